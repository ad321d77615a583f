import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

import pytest
from megatron_scripts import LLAMA3_8B, LLAMA3_8B_FP8, MIXTRAL_8X7B
from paths import ROOT

from megalaunch.config.compose import compose
from megalaunch.config.keys import schema_keys
from megalaunch.importers.megatron.arguments import flag_keys, known_flags, unmapped_reason
from megalaunch.importers.megatron.unsupported_flags import IGNORED, UNSUPPORTED
from megalaunch.plan.resolve import resolve
from megalaunch.platform.detect import detect_machine
from megalaunch.runs.import_megatron.importer import ScriptProblem, import_script, report_text
from megalaunch.schema.paths import value_at

MEGALAUNCH = str(Path(sys.executable).with_name("megalaunch"))
LOCAL = "--non-persistent-ckpt-type local --non-persistent-save-interval 20 --non-persistent-local-ckpt-dir /nvme/x"
FSDP, OUTER = "--use-megatron-fsdp ", "--outer-dp-sharding-strategy "
SMALL = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 "
    "--micro-batch-size 1 --global-batch-size 8 --train-iters 10 --lr 1e-3 "
)


def write(tmp_path, imported):
    path = tmp_path / "imported.yaml"
    path.write_text(imported.recipe.text)
    for name, text in imported.recipe.option_files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return path


def spec_of(tmp_path, text, **more):
    """The resolved spec of the recipe that a script becomes."""
    path = write(tmp_path, import_script(text, "imported", "test.sh", **more))
    return resolve(compose([f"recipe={path}"]).spec, detect_machine(), "imported").spec


def statuses(imported):
    return {entry.flag: (entry.status, entry.text) for entry in imported.flags}


def test_llama3_8b_is_the_model_that_we_ship(tmp_path):
    spec = spec_of(tmp_path, LLAMA3_8B)
    shipped = resolve(compose(["recipe=llama3_8b"]).spec, detect_machine(), "x").spec
    assert spec.model == shipped.model
    assert (spec.parallel.tp, spec.parallel.sequence_parallel, spec.parallel.data_sharding) == (2, True, "optim")
    assert (spec.cluster.nodes, spec.cluster.devices_per_node) == (2, 8)
    assert (spec.batch.sequence_length, spec.batch.micro_batch_size, spec.batch.global_batch_size) == (8192, 1, 128)
    assert (spec.train.steps, spec.schedule.warmup_steps, spec.schedule.decay_steps) == (10000, 100, 10000)
    assert (spec.optimizer.lr, spec.schedule.min_lr, spec.schedule.shape) == (3e-4, 3e-5, "cosine")
    assert (spec.precision.compute_dtype, spec.precision.fp8.recipe, spec.precision.fp8.amax_history_len) == (
        "fp8",
        "delayed",
        1024,
    )
    assert spec.precision.fp8.param_gather
    assert spec.data.mock
    assert (spec.checkpoint.interval, spec.train.validation_interval, spec.logging.log_interval) == (1000, 100, 1)


def test_the_fp8_example_is_the_run_of_our_recipe_with_the_overrides_of_the_page(tmp_path):
    """Every flag is mapped, or has no effect; the importer names the chip only if asked."""
    assert not [entry for entry in import_script(LLAMA3_8B_FP8, "imported", "x").flags if entry.status == "unsupported"]
    page = (ROOT / "docs/import-megatron.md").read_text()
    _, command = page.split("megalaunch plan ")
    overrides = shlex.split(command.partition("```")[0].replace("\\\n", " "))
    written = resolve(compose(overrides).spec, detect_machine(), "imported").spec
    assert spec_of(tmp_path, LLAMA3_8B_FP8, platform="h100") == written


def test_mixtral_8x7b_is_the_model_that_we_ship(tmp_path):
    imported = import_script(MIXTRAL_8X7B, "imported", "mixtral.sh")
    assert imported.recipe.picked["model"] == "mixtral_8x7b"
    spec = spec_of(tmp_path, MIXTRAL_8X7B)
    shipped = resolve(
        compose(["model=mixtral_8x7b", "batch.sequence_length=1", "batch.global_batch_size=1", "train.steps=1"]).spec,
        detect_machine(),
        "x",
    ).spec
    assert spec.model == shipped.model
    assert (spec.parallel.pp, spec.parallel.ep, spec.parallel.vpp, spec.parallel.overlap_p2p_comm) == (4, 8, 4, True)
    assert (spec.cluster.nodes, spec.cluster.devices_per_node) == (8, 8)
    assert (spec.train.steps, spec.schedule.decay_steps, spec.data.split) == (500000, 320000, "99990,8,2")
    assert statuses(imported)["--data-path"][0] == "unresolved"


def test_a_model_that_differs_in_little_is_named_and_one_that_differs_in_much_is_not(tmp_path):
    shape = SMALL.replace("--num-layers 4 --hidden-size 64 --num-attention-heads 4", "").replace(
        "--max-position-embeddings 32", "--max-position-embeddings 2048"
    )
    shape += " --no-bias-gelu-fusion --num-layers 96 --hidden-size 12288 --num-attention-heads 96"
    gpt3 = f"A=({shape})\npython pretrain_gpt.py ${{A[@]}}"
    imported = import_script(gpt3, "x", "x")
    assert imported.recipe.picked["model"] == "gpt3_175b"
    assert "activation: gelu\n" in imported.recipe.text
    more = (
        "--normalization RMSNorm --disable-bias-linear --position-embedding-type rope --squared-relu --rotary-base 7 "
        "--untie-embeddings-and-output-weights --qk-layernorm"
    )
    other = gpt3.replace("96)", f"96 {more})")
    imported = import_script(other, "x", "x")
    assert "model" not in imported.recipe.picked
    assert "family: qwen3\n" in imported.recipe.text


def test_what_a_variable_is_set_to_fills_what_is_open(tmp_path):
    spec = spec_of(tmp_path, MIXTRAL_8X7B, given={"1": "/data/corpus_text_document"})
    assert spec.data.train_prefix == "/data/corpus_text_document"
    assert spec_of(tmp_path, LLAMA3_8B, given={"NODES": "4"}).cluster.nodes == 4


@pytest.mark.parametrize(
    ("flags", "key", "value"),
    [
        ("", "model.activation", "gelu_tanh"),  # what the fused kernel of bias and GELU computes
        ("--no-bias-gelu-fusion", "model.activation", "gelu"),
        ("--disable-bias-linear", "model.activation", "gelu"),
        ("", "model.hidden_dropout", 0.1),
        ("", "model.norm", "layernorm"),
        ("", "model.position_embedding", "learned"),
        ("", "model.tie_word_embeddings", True),
        ("", "model.ffn_hidden_size", 256),
        ("", "model.mlp_bias", True),
        ("", "optimizer.beta2", 0.999),
        ("", "optimizer.weight_decay", 0.01),
        ("", "schedule.shape", "linear"),
        ("", "precision.compute_dtype", "fp32"),
        ("", "parallel.data_sharding", "no_shard"),
        ("--swiglu", "model.ffn_hidden_size", 128),
        ("--pipeline-model-parallel-size 2 --virtual-pipeline-model-parallel-size 2", "parallel.vpp", 2),
        (
            "--fp8-format hybrid --fp8-amax-compute-algo max --fp8-amax-history-len 16",
            "precision.fp8.amax_history_len", 16,
        ),
        (  # Megatron's most_recent
            "--fp8-format hybrid --fp8-amax-history-len 16", "precision.fp8.amax_history_len", 1,
        ),
        ("--fp8-format hybrid --fp8-amax-compute-algo most_recent", "precision.fp8.amax_history_len", 1),
        ("--fp8-format hybrid --fp8-margin 2", "precision.fp8.margin", 2),
        ("--fp8-format hybrid --no-fp8-wgrad", "precision.fp8.wgrad", False),
        ("--squared-relu", "model.activation", "squared_relu"),
        ("--quick-geglu --glu-linear-offset 1.0", "model.activation", "quick_geglu"),
        ("--disable-bias-linear --add-qkv-bias", "model.qkv_bias", True),
        ("--disable-bias-linear", "model.attention_output_bias", False),
        ("--qk-layernorm", "model.qk_norm", "head"),
        ("--window-size 127,0", "model.sliding_window", 128),
        ("--window-size '(127,0)' --window-attn-skip-freq 2", "model.sliding_window_pattern", 2),
        ("--window-size 127,0 --window-attn-skip-freq [1,1,0]*2", "model.sliding_window_pattern", 3),
        ("--softmax-type learnable", "model.attention_sinks", True),
        ("--attention-output-gate", "model.attention_output_gate", True),
        ("--attention-backend flash", "model.attention_backend", "flash"),
        ("--attention-backend fused", "model.attention_backend", "cudnn"),
        ("--attention-backend unfused", "model.attention_backend", "math"),
        ("--attention-backend auto", "model.attention_backend", "auto"),
        ("--softmax-scale 0.0625", "model.query_pre_attn_scalar", 256.0),
        ("--position-embedding-type rope --no-rope-freq 4", "model.no_rope_layer_interval", 4),
        ("--position-embedding-type rope --no-rope-freq '([0]*3+[1]*1)'", "model.no_rope_layer_interval", 4),
        ("--position-embedding-type rope --use-rope-scaling", "model.rope.scaling", "llama3"),
        ("--position-embedding-type rope --use-rope-scaling", "model.rope.factor", 8.0),
        ("--position-embedding-type rope --rotary-seq-len-interpolation-factor 4", "model.rope.scaling", "linear"),
        ("--multi-latent-attention --kv-lora-rank 32 --rotary-scaling-factor 40", "model.rope.scaling", "yarn"),
        ("--multi-latent-attention --qk-layernorm", "model.mla.kv_lora_rank", 32),
        ("--multi-latent-attention --qk-layernorm", "model.qk_norm", "none"),
        ("--num-experts 4 --moe-layer-freq '([0]*1+[1]*3)'", "model.moe.first_k_dense_replace", 1),
        ("--num-experts 4 --moe-layer-freq 2", "model.moe.layer_freq", 2),
        ("--num-experts 4 --moe-router-pre-softmax", "model.moe.normalize_top_k", False),
        ("--num-experts 4 --moe-router-score-function sigmoid", "model.moe.normalize_top_k", True),
        ("--num-experts 4 --moe-router-score-function sqrtsoftplus", "model.moe.score", "sqrtsoftplus"),
        (
            "--num-experts 4 --moe-router-score-function sigmoid --moe-router-topk 1",
            "model.moe.normalize_top_k",
            False,
        ),
        ("--num-experts 4", "model.moe.router_bias", True),
        ("--num-experts 4 --disable-bias-linear", "model.moe.router_bias", False),
        ("--num-experts 4 --moe-aux-loss-coeff 1e-3", "model.moe.balance_loss", "batch"),
        ("--num-experts 4", "model.moe.balance_loss", "none"),
        ("--num-experts 4 --tensor-model-parallel-size 2", "parallel.etp", 2),
        ("--num-experts 4 --moe-token-dispatcher-type flex", "parallel.moe_token_dispatcher_type", "flex"),
        ("--num-experts 4 --moe-router-load-balancing-type sinkhorn", "model.moe.choice", "sinkhorn"),
        (
            "--num-experts 4 --moe-router-load-balancing-type sinkhorn --moe-router-topk 1",
            "model.moe.score",
            "sigmoid",
        ),
        ("--num-experts 4 --moe-enable-deepep", "parallel.moe_token_dispatcher_type", "flex"),
        ("--moe-router-topk 4", "model.moe.num_experts", None),
        ("--sequence-parallel", "parallel.sequence_parallel", None),
        ("--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 1", "parallel.vpp", 2),
        ("--context-parallel-size 2 --cp-comm-type a2a", "parallel.cp_comm_type", "a2a"),
        ("--cp-comm-type p2p a2a p2p a2a", "parallel.cp_comm_type", ("p2p", "a2a", "p2p", "a2a")),
        ("--use-megatron-fsdp", "parallel.data_sharding", "optim_grads_params"),
        ("--use-megatron-fsdp --data-parallel-sharding-strategy optim", "parallel.data_sharding", "optim"),
        ("--num-distributed-optimizer-instances 2 --use-distributed-optimizer", "parallel.dp_replicate", 2),
        ("--fp16", "precision.loss_scale.initial", 2.0**32),
        ("--bf16 --grad-reduce-in-bf16", "precision.grad_reduce_dtype", "bf16"),
        ("--bf16 --main-params-dtype bf16", "precision.main_params_dtype", "bf16"),
        ("--exp-avg-dtype bf16 --exp-avg-sq-dtype bf16", "precision.exp_avg_dtype", "bf16"),
        ("--recompute-activations", "recompute.modules", ("attention",)),
        ("--recompute-granularity full --recompute-method block --recompute-num-layers 2", "recompute.method", "block"),
        ("--recompute-granularity selective --recompute-modules mlp layernorm", "recompute.modules", ("mlp", "norm")),
        ("--step-batch-size-schedule '0:4 1K:8'", "batch.rampup_batch_size", "0:4 1K:8"),
        ("--lr-warmup-fraction 0.2", "schedule.warmup_steps", 2),
        ("--lr-decay-style WSD --lr-wsd-decay-iters 3", "schedule.wsd_decay_shape", "exponential"),
        ("--optimizer muon --muon-momentum 0.8", "optimizer.momentum", 0.8),
        ("--optimizer muon --muon-extra-scale-factor 0.3", "optimizer.muon_extra_scale_factor", 0.3),
        ("--optimizer muon", "optimizer.nesterov", False),
        ("--optimizer-cpu-offload", "optimizer.optimizer_offload_fraction", 1.0),
        ("--data-path 0.7 /a 0.3 /b", "data.blend", ("0.7 /a", "0.3 /b")),
        ("--data-path /a", "data.split", "969,30,1"),
        ("--valid-data-path /v", "data.validation_prefix", "/v"),
        ("--fim-data", "data.fim_rate", 0.5),
        ("--fim-data --fim-prefix-token '<P>' --fim-middle-token '<M>' --fim-suffix-token '<S>'", "data.fim_tokens",
         ("<P>", "<M>", "<S>")),
        ("--distributed-timeout-minutes 5", "launcher.hang_timeout", 300.0),
        ("--global-batch-size=16", "batch.global_batch_size", 16),
        ("--num_layers 6", "model.num_layers", 6),
        ("--seed 7", "train.seed", 7),
        (LOCAL, "checkpoint.local.interval", 20),
        (LOCAL, "checkpoint.local.path", "/nvme/x"),
        (LOCAL, "checkpoint.local.replicate", False),
        (LOCAL + " --replication --replication-factor 2", "checkpoint.local.replicate", True),
    ],
)  # fmt: skip
def test_what_flags_mean(flags, key, value):
    values = import_script(SMALL + flags, "imported", "x").values
    found = values.get(key, schema_keys()[key].field.default)
    assert (tuple(found) if isinstance(found, list) else found) == value


def test_all_of_it_composes(tmp_path):
    """Values that are told are what the written recipe composes to, lists and quoted text among them."""
    flags = (
        "--num-experts 4 --moe-layer-freq 2 --window-size 15,0 --cp-comm-type p2p a2a p2p a2a --fp16 --optimizer muon "
        "--data-path 0.7 /a 0.3 '/b c' --step-batch-size-schedule '0:4 1K:8' --recompute-granularity selective "
        "--recompute-modules mlp moe --position-embedding-type rope --use-rope-scaling --lr-decay-style WSD "
        "--tensor-model-parallel-size 2 --wandb-project NULL --weight-decay-incr-style linear "
        "--start-weight-decay 0.01 --end-weight-decay 0.1"
    )
    imported = import_script(SMALL + flags, "imported", "x")
    spec = compose([f"recipe={write(tmp_path, imported)}"]).spec
    for key, value in imported.values.items():
        assert value_at(spec, key) == (tuple(value) if isinstance(value, list) else value), key


@pytest.mark.parametrize(
    ("flags", "flag", "status", "text"),
    [
        ("--use-flash-attn", "--use-flash-attn", "ignored", "Megatron itself ignores it"),
        ("--tensorboard-dir /x", "--tensorboard-dir", "mapped", "logging.trackers = [tensorboard]"),
        ("--wandb-project x", "--wandb-project", "mapped", "logging.tracker_project = x"),
        ("--log-validation-ppl-to-tensorboard", "--log-validation-ppl-to-tensorboard", "ignored", "logging.trackers"),
        ("--log-throughput", "--log-throughput", "ignored", "its own metrics"),
        ("--fp8-format hybrid --fp8-amax-history-len 16", "--fp8-amax-history-len", "ignored", "the newest value"),
        ("--moe-router-topk 2", "--moe-router-topk", "ignored", "without --num-experts"),
        ("--num-query-groups 2", "--num-query-groups", "ignored", "without --group-query-attention"),
        ("--sequence-parallel", "--sequence-parallel", "ignored", "at tp 1"),
        ("--qk-l2-norm", "--qk-l2-norm", "unsupported", "the only QK norm"),
        (
            "--position-embedding-type relative",
            "--position-embedding-type",
            "unsupported",
            "relative position embeddings",
        ),
        ("--attention-backend fast", "--attention-backend", "unsupported", "must be auto | flash | fused"),
        ("--softmax-type off-by-one", "--softmax-type", "unsupported", "learned"),
        ("--position-embedding-type rope --no-rope-freq [1,0,0,0]", "--no-rope-freq", "unsupported", "every n-th"),
        ("--optimizer soap", "--optimizer", "unsupported", "soap is not supported"),
        ("--num-experts 4 --moe-layer-freq [1,0,0,1]*1+[1]", "--moe-layer-freq", "unsupported", "every n-th"),
        ("--lr abc", "--lr", "unsupported", "must be a number, got 'abc'"),
        ("--export-qk-l2-norm", "--export-qk-l2-norm", "unsupported", "the only QK norm"),
        ("--init-method-xavier-uniform", "--init-method-xavier-uniform", "unsupported", "normal distribution"),
        ("--fim-data --fim-prefix-token '<P>'", "--fim-prefix-token", "unsupported", "all three FIM tokens"),
        ("--fp8-format hybrid --fp8-recipe custom", "--fp8-recipe", "unsupported", "must be delayed | tensorwise"),
        (
            "--num-experts 4 --moe-token-dispatcher-type alltoall_seq",
            "--moe-token-dispatcher-type",
            "unsupported",
            "must be alltoall | allgather | flex, got 'alltoall_seq'",
        ),
        ("--tensor-model-parallel-size 0", "--tensor-model-parallel-size", "unsupported", "must be at least 1"),
        ("--tensor-model-paralel-size 2", "--tensor-model-paralel-size", "unknown", "--tensor-model-parallel-size"),
        (LOCAL + " --replication --replication-factor 3", "--replication-factor", "unsupported", "has one copy"),
        (LOCAL + " --replication-jump 8", "--replication-jump", "ignored", "its copy is on the next node"),
        ("--non-persistent-ckpt-type global", "--non-persistent-ckpt-type", "unsupported", "of type local"),
        ("--non-persistent-save-interval 5", "--non-persistent-save-interval", "unsupported", "of type local"),
        ("--replication", "--replication", "ignored", "without --non-persistent-ckpt-type local"),
        ("--save-interval", "--save-interval", "unknown", "no value"),
        ("--hybrid-layer-pattern M*-", "--hybrid-layer-pattern", "unsupported", "heterogeneous layers"),
        ("--spec my.layers spec", "--spec", "unsupported", "named by their code"),
        ("--exit-interval 11", "--exit-interval", "ignored", "after the last step, 10"),
        ("--exit-interval 10", "--exit-interval", "mapped", "train.exit_at_step = 10"),
        ("--rotary-interleaved", "--rotary-interleaved", "ignored", "order of the rows of query and key weights"),
        ("--use-tp-pp-dp-mapping", "--use-tp-pp-dp-mapping", "ignored", "affects speed only"),
        (OUTER + "no_shard", "--outer-dp-sharding-strategy", "ignored", "without --use-megatron-fsdp"),
        (FSDP + OUTER + "no_shard", "--outer-dp-sharding-strategy", "ignored", "states the default"),
        (FSDP + OUTER + "optim", "--outer-dp-sharding-strategy", "unsupported", "shards inside a replica only"),
        ("--data-path $DATA", "--data-path", "unresolved", "depends on the running shell"),
        ("--data-path $(ls /tmp)", "--data-path", "unresolved", "depends on the running shell"),
    ],
)
def test_what_becomes_of_flags_that_set_nothing(flags, flag, status, text):
    found = statuses(import_script(SMALL + flags, "imported", "x"))[flag]
    assert found[0] == status
    assert text in found[1]


LAUNCH = "torchrun pretrain_gpt.py --num-layers 2 --hidden-size 64"


@pytest.mark.parametrize(
    ("script", "note"),
    [
        (f"for lr in 1e-4 3e-4; do {LAUNCH} --lr $lr; done", "imported as one pass; the value of lr is unknown"),
        (
            f"for i in 1 2\ndo\n  for lr in 1 2; do {LAUNCH} --lr $lr; done\ndone",
            "one pass; the value of lr is",
        ),
        (f"while true; do {LAUNCH}; done", "line 1: the while ... done is imported as one pass"),
        (f"for i in 1 2; do read x; done; {LAUNCH} --lr $i", "line 1: the for ... done is skipped"),
        (f"for i in 1 2; do N=$i; done; {LAUNCH}", "line 1: the for ... done is skipped"),
        (f"case $1 in a) {LAUNCH} --seed 1;; esac\n{LAUNCH}", "line 1: the case ... esac is skipped"),
    ],
)
def test_a_loop_gets_a_note_on_one_line_too(script, note):
    imported = import_script(script, "imported", "x")
    assert any(note in line for line in imported.notes), imported.notes
    assert imported.values["model.num_layers"] == 2
    assert statuses(imported).get("--lr", ("unresolved",))[0] == "unresolved"


def test_a_loop_that_says_nothing_of_the_run_gets_none():
    assert not import_script(f"for d in logs plots; do mkdir -p $d; done; {LAUNCH}", "imported", "x").notes
    parser = 'while [[ $# -gt 0 ]]; do case "$1" in --tp|-t) shift;; --help) exit;; esac; done\n'
    assert not import_script(parser + LAUNCH, "imported", "x").notes


def test_the_variable_of_a_loop_is_given_by_hand():
    script = f"for lr in 1e-4 3e-4; do {LAUNCH} --lr $lr; done"
    assert import_script(script, "imported", "x", {"lr": "3e-4"}).values["optimizer.lr"] == 3e-4


def test_every_flag_given_is_told_once():
    imported = import_script(LLAMA3_8B, "imported", "x")
    names = [entry.flag for entry in imported.flags]
    assert len(names) == len(set(names)) == 51
    assert "--never" not in names
    assert "--wandb-project" not in names
    assert all(entry.flag in report_text(imported) for entry in imported.flags)


def test_an_argument_file_and_a_bare_list(tmp_path):
    file = "# one a line\n--num-layers 4\n--hidden-size 64\n\n--num-attention-heads 4\n--swiglu\n"
    values = import_script(file, "x", "x").values
    assert (values["model.num_layers"], values["model.activation"]) == (4, "swiglu")
    assert import_script(file.replace("\n", " ")[14:], "x", "x").values["model.hidden_size"] == 64


def test_pipes_and_subshells_around_the_launch_lose_nothing():
    script = "(cd /a && torchrun a.py --num-layers 4 --lr 1e-3 2>&1 | tee log)\n(torchrun b.py --num-layers 2)\n"
    assert import_script(script, "x", "x").values["optimizer.lr"] == 1e-3


def test_what_is_missing_is_said():
    imported = import_script("--num-layers 4 --hidden-size 64", "x", "x")
    assert set(imported.missing) == {
        "model.num_attention_heads", "batch.sequence_length", "batch.global_batch_size", "train.steps",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('echo "open', 'line 1: the quote " is not closed'),
        ("A=(1 2", r"line 1: the array's \( is not closed"),
        ("echo hello\n", "has no Megatron-LM argument"),
        ("", "has no Megatron-LM argument"),
        ("\x00\x01" * 500, "has no Megatron-LM argument"),
        ("A=aaaaaaaaaa\n" + "A=$A$A\n" * 40, "grows beyond"),
        ("A=(a b c d)\n" + "A=(${A[@]} ${A[@]})\n" * 40, "grows beyond"),
        ("--a " * 400_000, "the limit is 1,000,000"),
        ("echo ${A:-" * 60 + "x" + "}" * 60, "nested deeper"),
        ("--num-layers 4 --layout Et|t|tL --lr 1e-3 --bf16", r"line 1: bash ends the command before 'tL', at a '|'"),
        ("torchrun a.py --num-layers 4 --bf16 \\\n --layout Et|tL --lr 1e-3 2>&1 | tee log", "before 'tL', at a"),
        ("torchrun a.py --num-layers 4 --bf16 --moe-layer-freq ([0]*3) --lr 1", r"before '--lr', at a '\)' without"),
    ],
)
def test_what_is_no_script(text, message):
    began = time.process_time()
    with pytest.raises(ScriptProblem, match=message):
        import_script(text, "x", "x")
    assert time.process_time() - began < 3


def test_nothing_is_executed_and_no_environment_is_read(tmp_path, monkeypatch):
    marker = tmp_path / "ran"
    monkeypatch.setenv("SECRET", "s3cret")
    script = (
        f"touch {marker}\nX=$(touch {marker})\nY=`touch {marker}`\nZ=$((__import__('os').system('touch {marker}')))\n"
        f"if touch {marker}; then echo; fi\nfor i in 1; do touch {marker}; done\neval touch {marker}\n"
        f"torchrun pretrain_gpt.py {SMALL} --seed $Z --data-path $X ${{SECRET}} --moe-layer-freq "
        f"\"[__import__('os').system('touch {marker}')]\"\n"
    )
    imported = import_script(script, "x", "x")
    assert not marker.exists()
    assert "s3cret" not in json.dumps([entry.values for entry in imported.flags])
    assert statuses(imported)["--seed"][0] == "unresolved"


def test_the_tables_agree_with_the_schema_and_each_other():
    assert [key for name in known_flags() for key in flag_keys(name) if key not in schema_keys()] == []
    exact = [flag for table in (IGNORED, UNSUPPORTED) for row in table.values() for flag in row.split()]
    assert sorted({flag for flag in exact if exact.count(flag) > 1}) == []
    assert [name for name in exact if name in known_flags()] == []
    assert all(unmapped_reason(flag.rstrip("*")) for flag in exact)


def test_the_command_writes_a_recipe_that_composes(tmp_path):
    (tmp_path / "train.sh").write_text(LLAMA3_8B.replace("--save-interval", "--tp-comm-overlap --save-interval"))
    command = [MEGALAUNCH, "import-megatron", "train.sh", "--output", "out/my-run.yaml", "--platform", "h100"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "mapped (" in done.stdout
    written = (tmp_path / "out/conf/parallel/my_run.yaml").read_text()
    assert written == "tp: 2\nsequence_parallel: true\ntp_comm_overlap: true\n"
    spec = compose([f"recipe={tmp_path}/out/my-run.yaml"]).spec
    assert (spec.parallel.tp, spec.parallel.tp_comm_overlap, spec.platform.chip) == (2, True, "h100")
    again = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert again.returncode == 2
    assert re.search(r"out/my-run\.yaml.* exists; name another file, or add --force", again.stderr)


def test_the_command_prints_json_and_reads_standard_input(tmp_path):
    done = subprocess.run(
        [MEGALAUNCH, "import-megatron", "-", "--json"], input=SMALL, capture_output=True, text=True, check=True
    )
    told = json.loads(done.stdout)
    assert told["values"]["model.num_layers"] == 4
    assert told["flags"][0] == {
        "flag": "--num-layers", "values": ["4"], "status": "mapped", "text": "model.num_layers = 4",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("exports", "backend"),
    [
        ("NVTE_FLASH_ATTN=0 NVTE_UNFUSED_ATTN=0", "cudnn"),
        ("NVTE_FUSED_ATTN=0 NVTE_UNFUSED_ATTN=0 NVTE_FLASH_ATTN=1", "flash"),
        ("NVTE_FUSED_ATTN=0 NVTE_FLASH_ATTN=0", "math"),
        ("NVTE_FLASH_ATTN=0", "auto"),
    ],
)
def test_variables_of_transformer_engine_leave_one_kernel(exports, backend):
    imported = import_script(f"export {exports} NCCL_DEBUG=INFO\n{SMALL}", "imported", "x")
    assert imported.values.get("model.attention_backend", "auto") == backend
    assert any(note.startswith("read for model.attention_backend: NVTE_") for note in imported.notes)
    assert "environment variables are not imported: NCCL_DEBUG" in imported.notes


EP8 = "--num-experts 8 --expert-model-parallel-size 8 --tensor-model-parallel-size 2"


@pytest.mark.parametrize(
    ("nodes", "flags", "problem"),
    [
        (1, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4", "needs 16 devices (tp 4 x pp 4)"),
        (2, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4", None),
        (1, "--tensor-model-parallel-size 2 --context-parallel-size 8", "needs 16 devices (tp 2 x cp 8)"),
        (1, "--pipeline-model-parallel-size 3", "needs a multiple of 3 devices (pp 3)"),
        (1, "--num-experts 16 --expert-model-parallel-size 16", "needs 16 devices (ep 16)"),
        (1, f"{EP8} --expert-tensor-parallel-size 1", None),
        (1, EP8, "needs 16 devices (etp 2 x ep 8)"),
        (None, "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 4", None),
    ],
)
def test_devices_that_cannot_hold_the_layout_are_named(nodes, flags, problem):
    start = "torchrun --nproc_per_node 8" + ("" if nodes is None else f" --nnodes {nodes}")
    imported = import_script(f"{start} pretrain_gpt.py {SMALL}{flags}", "imported", "test.sh")
    expected = () if problem is None else (f"the script starts {nodes} x 8 devices, and its layout {problem}",)
    assert imported.problems == expected
    assert ("cannot start: correct this in the recipe\n  the script starts" in report_text(imported)) == bool(expected)
