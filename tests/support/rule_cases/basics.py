"""Cases of the rules that every run meets: shape, batch, schedule, data, devices, launch."""

from rule_cases.case import TINY, Case

TOKENS = "data.corpus=null data.train_prefix=PREFIX"

CASES = {
    "model.head_dim": Case("model.num_attention_heads=6", "model.num_attention_heads=6 model.head_dim=8"),
    "model.head_dim_even": Case("model.head_dim=7", "model.head_dim=6"),
    "model.heads_by_groups": Case("model.num_query_groups=3", "model.num_query_groups=4"),
    "model.positions": Case("batch.sequence_length=1025", "batch.sequence_length=1024"),
    "model.vocab_covers_tokenizer": Case("model.vocab_size=319", "model.vocab_size=320"),
    "batch.global_by_dp": Case("parallel=dp3", "parallel=dp3 batch.global_batch_size=12"),
    "schedule.warmup_twice": Case(
        "schedule.warmup_fraction=0.5 schedule.warmup_steps=3", "schedule.warmup_fraction=0.5 schedule.warmup_steps=10"
    ),
    "schedule.warmup": Case("schedule.warmup_steps=20", "schedule.warmup_steps=19"),
    "schedule.min_lr": Case("schedule.min_lr=0.011", "schedule.min_lr=0.01"),
    "schedule.wsd": Case("schedule=wsd schedule.wsd_decay_steps=17", "schedule=wsd schedule.wsd_decay_steps=16"),
    "optimizer.betas": Case("optimizer.beta2=1.0", "optimizer.beta2=0.999"),
    "train.exit_at_step": Case("train.exit_at_step=21", "train.exit_at_step=20"),
    "data.source": Case("data.corpus=null data.mock=false", "data.corpus=null", purpose="train"),
    "data.validation_source": Case("data.validation_prefix=PREFIX", "data.validation_prefix=null"),
    "data.tokens_exist": Case(
        "data.corpus=null data.train_prefix=none/at/all tokenizer.path=TOKENIZER", f"{TOKENS} tokenizer.path=TOKENIZER"
    ),
    "tokenizer.path": Case("tokenizer.path=none/at/all.json", "tokenizer.path=TOKENIZER"),
    "tokenizer.of_tokens": Case(TOKENS, f"{TOKENS} tokenizer.path=TOKENIZER"),
    "platform.chip": Case("platform.chip=h1000", "platform.chip=h100 cluster.devices_per_node=1"),
    "cluster.devices": Case("platform=h100_nvl", "platform=h100_nvl cluster.devices_per_node=2"),
    "cluster.cores": Case("parallel=dp9 batch.global_batch_size=36", "parallel=dp8 batch.global_batch_size=32"),
    "run.local_paths": Case("data.corpus=https://a.example/b.txt", "data.corpus=https:/a.example/b.txt"),
    "run.secret_values": Case(
        "logging.tracker_project=hf_EXAMPLEexampleEXAMPLEexampleEXAMPLE", "logging.tracker_project=hf_example"
    ),
    "run.name": Case("run.name=a/b", "run.name=a-b_c.1"),
    "launcher.ft_launcher": Case("launcher.enable_ft_package=true", "launcher.enable_ft_package=false"),
    "launcher.multi_node": Case("cluster.nodes=2", "cluster.nodes=1", (*TINY, "batch.global_batch_size=16"), "train"),
}
