"""`megalaunch convert import-megatron`: what it carries, what it lists, and that no pickle makes anything run."""

from __future__ import annotations

import os
import pickle
import socket
import subprocess
import warnings
from argparse import Namespace
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter, save
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.engine.checkpoint import megatron_checkpoint
from megalaunch.engine.checkpoint.export_huggingface import StoredWeights

LAYERS, WIDTH, INNER, HEADS, GROUPS, HEAD, ROWS = 2, 16, 24, 4, 2, 4, 40
ARGUMENTS = {
    "num_layers": LAYERS,
    "hidden_size": WIDTH,
    "ffn_hidden_size": INNER,
    "num_attention_heads": HEADS,
    "group_query_attention": True,
    "num_query_groups": GROUPS,
    "kv_channels": HEAD,
    "max_position_embeddings": 32,
    "padded_vocab_size": ROWS,
    "normalization": "RMSNorm",
    "swiglu": True,
    "add_bias_linear": False,
    "position_embedding_type": "rope",
    "rotary_base": 500,
    "untie_embeddings_and_output_weights": True,
    "params_dtype": torch.bfloat16,
    "num_experts": None,
}


def shapes() -> dict[str, tuple[int, ...]]:
    """Names and shapes of a stacked GPT checkpoint, as Megatron's documentation gives them."""
    stack = "decoder.layers."
    return {
        "embedding.word_embeddings.weight": (ROWS, WIDTH),
        "decoder.final_layernorm.weight": (WIDTH,),
        "output_layer.weight": (ROWS, WIDTH),
        stack + "self_attention.linear_qkv.weight": (LAYERS, (HEADS + 2 * GROUPS) * HEAD, WIDTH),
        stack + "self_attention.linear_qkv.layer_norm_weight": (LAYERS, WIDTH),
        stack + "self_attention.linear_proj.weight": (LAYERS, WIDTH, HEADS * HEAD),
        stack + "mlp.linear_fc1.weight": (LAYERS, 2 * INNER, WIDTH),
        stack + "mlp.linear_fc1.layer_norm_weight": (LAYERS, WIDTH),
        stack + "mlp.linear_fc2.weight": (LAYERS, WIDTH, INNER),
    }


def write(folder: Path, tensors: dict[str, torch.Tensor], arguments: dict[str, object]) -> None:
    beside = {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(3), "rng_state/shard_0_1": torch.zeros(2)}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        save({**tensors, **beside}, storage_writer=FileSystemWriter(folder), no_dist=True)
    torch.save({"args": Namespace(**arguments), "iteration": 40}, folder / "common.pt")


@pytest.fixture
def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {name: torch.randn(shape, generator=generator) for name, shape in shapes().items()}


@pytest.fixture
def saved(tensors, tmp_path) -> Path:
    write(tmp_path / "megatron", tensors, ARGUMENTS)
    return tmp_path / "megatron"


def convert(source: Path, *arguments: str):
    output = source.parent / "ckpt"
    return CliRunner().invoke(app, ["convert", "import-megatron", str(source), "--output", str(output), *arguments])


def test_every_tensor_arrives(saved, tensors):
    done = convert(saved, "--allow-pickle", "--vocab-size", "37")
    assert done.exit_code == 0, done.output
    assert "iteration 40" in done.output
    weights = StoredWeights(saved.parent / "ckpt")
    assert weights.model.vocab_size == 37
    stack = {name.removeprefix("decoder.layers."): tensor for name, tensor in tensors.items()}
    queries_per_group = HEADS // GROUPS
    for layer in range(LAYERS):
        qkv = stack["self_attention.linear_qkv.weight"][layer].view(GROUPS, queries_per_group + 2, HEAD, WIDTH)
        gate_up = stack["mlp.linear_fc1.weight"][layer]
        expected = {
            "attention.q_proj": qkv[:, :queries_per_group].reshape(-1, WIDTH),
            "attention.k_proj": qkv[:, -2].reshape(-1, WIDTH),
            "attention.v_proj": qkv[:, -1].reshape(-1, WIDTH),
            "attention.o_proj": stack["self_attention.linear_proj.weight"][layer],
            "attention_norm": stack["self_attention.linear_qkv.layer_norm_weight"][layer],
            "mlp.gate_proj": gate_up[:INNER],
            "mlp.up_proj": gate_up[INNER:],
            "mlp.down_proj": stack["mlp.linear_fc2.weight"][layer],
            "mlp_norm": stack["mlp.linear_fc1.layer_norm_weight"][layer],
        }
        for name, value in expected.items():
            assert torch.equal(weights.read(f"layers.{layer}.{name}.weight"), value), name
    assert torch.equal(weights.read("embedding.weight"), tensors["embedding.word_embeddings.weight"][:37])
    assert torch.equal(weights.read("head.weight"), tensors["output_layer.weight"][:37])
    assert torch.equal(weights.read("norm.weight"), tensors["decoder.final_layernorm.weight"])


EXPERTS, EXPERT, SHARED = 4, 6, 10
EXPERT_ARGUMENTS = {
    "num_experts": EXPERTS,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": EXPERT,
    "moe_layer_freq": [0, 1],
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
    "moe_shared_expert_intermediate_size": SHARED,
    "moe_shared_expert_gate": True,
}


def test_experts_arrive(tensors, tmp_path):
    """Layer 1 has experts, and its norm apart, as Transformer Engine's layers have it."""
    unstacked = {name: value for name, value in tensors.items() if "decoder.layers." not in name}
    for name, value in tensors.items():
        part = name.removeprefix("decoder.layers.")
        if part != name:
            unstacked |= {f"decoder.layers.{layer}.{part}": value[layer].clone() for layer in range(LAYERS)}
    block = "decoder.layers.1.mlp."
    norm = unstacked.pop(f"{block}linear_fc1.layer_norm_weight")
    experts = {
        "router.weight": torch.randn(EXPERTS, WIDTH),
        "router.expert_bias": torch.randn(EXPERTS),
        "experts.experts.linear_fc1.weight": torch.randn(EXPERTS, 2 * EXPERT, WIDTH),
        "experts.experts.linear_fc2.weight": torch.randn(EXPERTS, WIDTH, EXPERT),
        "shared_experts.linear_fc1.weight": torch.randn(2 * SHARED, WIDTH),
        "shared_experts.linear_fc2.weight": torch.randn(WIDTH, SHARED),
        "shared_experts.gate_weight": torch.randn(1, WIDTH),
    }
    dense = {f"{block}{name}.weight" for name in ("linear_fc1", "linear_fc2")}
    kept = {name: value for name, value in unstacked.items() if name not in dense}
    kept |= {block + name: value for name, value in experts.items()} | {
        "decoder.layers.1.pre_mlp_layernorm.weight": norm
    }
    write(tmp_path / "megatron", kept, {**ARGUMENTS, **EXPERT_ARGUMENTS})
    done = convert(tmp_path / "megatron", "--allow-pickle")
    assert done.exit_code == 0, done.output
    weights = StoredWeights(tmp_path / "ckpt")
    moe = weights.model.moe
    assert (moe.first_k_dense_replace, moe.score, moe.balance_bias, moe.normalize_top_k) == (1, "sigmoid", True, True)
    gate_up, shared = experts["experts.experts.linear_fc1.weight"], experts["shared_experts.linear_fc1.weight"]
    expected = {
        "mlp_norm.weight": norm,
        "mlp.router.weight": experts["router.weight"],
        "mlp.router.expert_bias": experts["router.expert_bias"],
        "mlp.experts.gate_proj.weight": gate_up[:, :EXPERT],
        "mlp.experts.up_proj.weight": gate_up[:, EXPERT:],
        "mlp.experts.down_proj.weight": experts["experts.experts.linear_fc2.weight"],
        "mlp.shared_experts.gate_proj.weight": shared[:SHARED],
        "mlp.shared_experts.up_proj.weight": shared[SHARED:],
        "mlp.shared_experts.down_proj.weight": experts["shared_experts.linear_fc2.weight"],
        "mlp.shared_expert_gate.weight": experts["shared_experts.gate_weight"],
    }
    for name, value in expected.items():
        assert torch.equal(weights.read(f"layers.1.{name}"), value), name
    assert torch.equal(
        weights.read("layers.0.mlp.up_proj.weight"), tensors["decoder.layers.mlp.linear_fc1.weight"][0, INNER:]
    )


def test_pickles_are_read_only_when_allowed(saved):
    done = convert(saved)
    assert done.exit_code == 2
    assert "pickles, which can contain code" in done.output
    assert "add --allow-pickle" in done.output


def test_every_fault_is_listed_and_nothing_written(tensors, tmp_path):
    del tensors["decoder.final_layernorm.weight"]
    tensors["decoder.layers.mlp.linear_fc2.weight"] = torch.zeros(LAYERS, WIDTH, INNER + 1)
    tensors["decoder.layers.mlp.router.weight"] = torch.zeros(LAYERS, 2, WIDTH)
    write(tmp_path / "megatron", tensors, ARGUMENTS)
    done = convert(tmp_path / "megatron", "--allow-pickle", "--vocab-size", "41")
    assert done.exit_code == 4
    for text in (
        "missing: decoder.final_layernorm.weight [16]",
        "wrong shape: decoder.layers.0.mlp.linear_fc2.weight is [16, 25], its arguments expect [16, 24]",
        "unexpected: decoder.layers.1.mlp.router.weight [2, 16]",
        "--vocab-size 41: the embedding has 40 rows",
    ):
        assert text in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


def test_other_models_are_refused_by_argument(tensors, tmp_path):
    changes = {"rotary_interleaved": True, "hybrid_layer_pattern": "M*"}
    write(tmp_path / "megatron", tensors, {**ARGUMENTS, **changes})
    done = convert(tmp_path / "megatron", "--allow-pickle")
    assert done.exit_code == 4
    assert "--rotary-interleaved True: such models cannot be imported" in done.output
    assert "--hybrid-layer-pattern M*" in done.output


KEYS, ROTATED, VALUES, LATENT, QUERY_LATENT = 4, 2, 6, 5, 7
LATENT_ARGUMENTS = {
    "multi_latent_attention": True,
    "qk_layernorm": True,
    "group_query_attention": False,
    "q_lora_rank": QUERY_LATENT,
    "kv_lora_rank": LATENT,
    "qk_head_dim": KEYS,
    "qk_pos_emb_head_dim": ROTATED,
    "v_head_dim": VALUES,
    "rotary_percent": 0.5,
    "norm_epsilon": 1e-6,
}


def test_latent_attention_arrives_by_the_names_of_transformer_engine(tensors, tmp_path):
    """The norms of latents are in the projections after them, the norm before attention is apart."""
    stack = "decoder.layers."
    kept = {name: value for name, value in tensors.items() if not name.startswith(f"{stack}self_attention.")}
    attention = {
        "input_layernorm.weight": torch.randn(LAYERS, WIDTH),
        "self_attention.linear_q_down_proj.weight": torch.randn(LAYERS, QUERY_LATENT, WIDTH),
        "self_attention.linear_q_up_proj.layer_norm_weight": torch.randn(LAYERS, QUERY_LATENT),
        "self_attention.linear_q_up_proj.weight": torch.randn(LAYERS, HEADS * (KEYS + ROTATED), QUERY_LATENT),
        "self_attention.linear_kv_down_proj.weight": torch.randn(LAYERS, LATENT + ROTATED, WIDTH),
        "self_attention.linear_kv_up_proj.layer_norm_weight": torch.randn(LAYERS, LATENT),
        "self_attention.linear_kv_up_proj.weight": torch.randn(LAYERS, HEADS * (KEYS + VALUES), LATENT),
        "self_attention.linear_proj.weight": torch.randn(LAYERS, WIDTH, HEADS * VALUES),
    }
    kept |= {stack + name: value for name, value in attention.items()}
    write(tmp_path / "megatron", kept, {**ARGUMENTS, **LATENT_ARGUMENTS})
    done = convert(tmp_path / "megatron", "--allow-pickle")
    assert done.exit_code == 0, done.output
    weights = StoredWeights(tmp_path / "ckpt")
    assert (weights.model.mla.norm_epsilon, weights.model.rope.fraction) == (1e-6, 1.0)
    names = {
        "attention_norm": "input_layernorm.",
        "attention.q_a_proj": "self_attention.linear_q_down_proj.",
        "attention.q_a_norm": "self_attention.linear_q_up_proj.layer_norm_",
        "attention.kv_a_norm": "self_attention.linear_kv_up_proj.layer_norm_",
        "attention.kv_b_proj": "self_attention.linear_kv_up_proj.",
        "attention.o_proj": "self_attention.linear_proj.",
    }
    for ours, theirs in names.items():
        assert torch.equal(weights.read(f"layers.1.{ours}.weight"), attention[f"{theirs}weight"][1]), ours


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"qk_layernorm": False}, "--multi-latent-attention: latents without norms (--qk-layernorm)"),
        ({"position_embedding_type": "learned_absolute"}, "with --multi-latent-attention it must be rope"),
        ({"rope_type": "rope", "rotary_scaling_factor": 40.0, "mscale_all_dim": 1.0}, "--mscale-all-dim: only YaRN"),
    ],
)
def test_latent_attention_that_has_no_equal_is_refused(change, text, tensors, tmp_path):
    write(tmp_path / "megatron", tensors, {**ARGUMENTS, **LATENT_ARGUMENTS, "rotary_percent": 1.0, **change})
    done = convert(tmp_path / "megatron", "--allow-pickle")
    assert done.exit_code == 4
    assert text in done.output


class Evil:
    """Runs a command when it is unpickled in the usual way."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return os.system, (f"touch {self.marker}",)


class Sly(Evil):
    """The same without naming a shell."""

    def __reduce__(self):
        return eval, (f"open({str(self.marker)!r}, 'w')",)


def poisoned_metadata(saved: Path, evil: Evil) -> None:
    with (saved / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    metadata.planner_data = {"deep": [({"inside": evil},)]}
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))


def poisoned_arguments(saved: Path, evil: Evil) -> None:
    torch.save({"args": Namespace(**ARGUMENTS, extra=[evil]), "iteration": 1}, saved / "common.pt")


def poisoned_tensor(saved: Path, evil: Evil) -> None:
    """In the place of a tensor's own bytes; .metadata says as before where it lies."""
    with (saved / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    torch.save({"tensor": evil}, saved / "evil.distcp")
    for index, place in metadata.storage_data.items():
        if index.fqn == "output_layer.weight":
            place.relative_path, place.offset = "evil.distcp", 0
            place.length = (saved / "evil.distcp").stat().st_size
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))


@pytest.mark.parametrize("kind", [Evil, Sly])
@pytest.mark.parametrize("poison", [poisoned_metadata, poisoned_arguments, poisoned_tensor])
def test_code_in_a_pickle_is_refused_by_name_and_does_not_run(poison, kind, saved, tmp_path):
    marker = tmp_path / "it ran"
    poison(saved, kind(marker))
    done = convert(saved, "--allow-pickle")
    assert done.exit_code == 4
    assert f"  {'posix.system' if kind is Evil else 'builtins.eval'} (in " in done.output
    assert "no code of them was run" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


def test_the_poison_would_work_elsewhere(saved, tmp_path):
    """The tests above can fail: the usual way of opening such a file does run what is in it."""
    poisoned_metadata(saved, Sly(tmp_path / "it ran"))
    with (saved / ".metadata").open("rb") as file:
        pickle.load(file)
    assert (tmp_path / "it ran").exists()


def test_names_inside_of_allowed_modules_are_no_way_in(saved):
    """A dotted name, and a class that is known from elsewhere."""
    torch.save({"args": Namespace(**ARGUMENTS)}, saved / "common.pt")
    reached = b"\x80\x04\x8c\x08argparse\x8c\x0f_sys.modules.os\x93."
    (saved / ".metadata").write_bytes(reached)
    done = convert(saved, "--allow-pickle")
    assert done.exit_code == 4
    assert "argparse._sys.modules.os (in .metadata)" in done.output


def test_damaged_and_other_files(saved, tmp_path):
    (saved / "__0_0.distcp").write_bytes((saved / "__0_0.distcp").read_bytes()[:3000])
    done = convert(saved, "--allow-pickle")
    assert done.exit_code == 4
    assert "__0_0.distcp" in done.output
    (saved / ".metadata").write_bytes(b"\x80\x04]")
    assert "it is damaged, or not a torch_dist checkpoint" in convert(saved, "--allow-pickle").output
    (saved / ".metadata").unlink()
    assert "it has no .metadata" in convert(saved, "--allow-pickle").output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


def doubled(value: object, times: int, kind: type = list) -> object:
    """A value of a few objects that is written out in 2 ** times."""
    for _ in range(times):
        value = kind([value, value])
    return value


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (doubled(1, 60), "too many values or too deeply nested lists"),
        (doubled(1, 18), "too many values or too deeply nested lists"),
        (["a" * 10_000] * 1000, "too much text"),
        (2**5000, "a number that is too large"),
    ],
    ids=["deep", "wide", "texts", "number"],
)
def test_arguments_that_are_endless_when_written_out_are_refused(value, reason, saved, tmp_path):
    torch.save({"args": Namespace(**ARGUMENTS, extra=value), "iteration": 1}, saved / "common.pt")
    done = convert(saved, "--allow-pickle")
    assert done.exit_code == 4
    assert f"common.pt: its arguments have {reason}" in done.output
    assert sorted(path.name for path in tmp_path.iterdir()) == ["megatron"]


def changed_metadata(saved: Path, change) -> str:
    with (saved / ".metadata").open("rb") as file:
        metadata = pickle.load(file)
    change(metadata)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    done = convert(saved, "--allow-pickle")
    assert done.exit_code == 4, done.output
    return done.output


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda tensor: setattr(tensor.properties, "dtype", doubled("x", 60, tuple)), "has an unknown dtype"),
        (lambda tensor: setattr(tensor, "size", [0] * 100), "is not a short list of integers"),
        (lambda tensor: setattr(tensor, "size", [2**80]), "has a number that is not a size"),
        (lambda tensor: setattr(tensor.chunks[0], "offsets", doubled(0, 60, tuple)), "has a number that is not a size"),
    ],
    ids=["dtype", "dims", "size", "offsets"],
)
def test_sizes_and_kinds_that_are_none_are_refused(change, reason, saved):
    assert reason in changed_metadata(saved, lambda it: change(it.state_dict_metadata["output_layer.weight"]))


def test_a_stack_of_more_layers_than_models_have_is_refused(saved):
    def change(metadata):
        name = "decoder.layers.mlp.linear_fc2.weight"
        tensor = metadata.state_dict_metadata[name]
        tensor.size, tensor.chunks[0].sizes = torch.Size([10**12, 0]), torch.Size([10**12, 0])

    said = changed_metadata(saved, change)
    assert "which contradicts .metadata" in said or "more layers than models have" in said


def test_what_takes_too_long_ends_with_its_reason(saved, monkeypatch):
    """The hash of nested tuples is taken while they are unpickled: only the limit on CPU time ends that."""
    tuples = b"".join(b"h%ch%c\x86\x940" % (level, level) for level in range(60))  # each of twice the one before
    (saved / ".metadata").write_bytes(b"\x80\x04K\x01\x940" + tuples + b"}h<K\x01s.")  # and the last one as a key
    reader = megatron_checkpoint._READER
    quick = saved.parent / "quick.py"
    quick.write_text(reader.read_text().replace("(_START_SECONDS + ", "(1 + "))
    monkeypatch.setattr(megatron_checkpoint, "_READER", quick)
    done = convert(saved, "--allow-pickle")
    assert done.exit_code == 4
    assert f"{saved} is refused: reading its pickles exceeds the CPU time limit for their size" in done.output


def test_the_process_that_reads_pickles_has_no_network(saved, monkeypatch):
    """Whatever a pickle might come to run there reaches nobody, not even this machine."""
    if subprocess.run(["unshare", "--user", "--net", "true"], capture_output=True).returncode:
        pytest.skip("this system permits no network namespace")
    reader, talking = megatron_checkpoint._READER, saved.parent / "talking.py"
    with socket.create_server(("127.0.0.1", 0)) as server:
        socket.create_connection(server.getsockname()).close()
        call = f"__import__('socket').create_connection({server.getsockname()!r})"
        begin = "    reply: dict[str, Any] = {}\n    try:\n"
        assert begin in reader.read_text()
        talking.write_text(reader.read_text().replace(begin, f"{begin}        {call}\n"))
        monkeypatch.setattr(megatron_checkpoint, "_READER", talking)
        done = convert(saved, "--allow-pickle")
    assert done.exit_code == 4
    assert "Network is unreachable" in done.output
