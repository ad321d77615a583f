"""Cases of the rules of memory, of devices and of the host, and of disk."""

from rule_cases.case import TINY, Case

CASES = {
    "memory.fits": Case("batch.micro_batch_size=8", "batch.micro_batch_size=1", ("recipe=llama3_8b", "data.corpus=x")),
    "memory.host": Case(
        "model.num_layers=8 model.hidden_size=2048 model.ffn_hidden_size=8192",
        "model.num_layers=2 model.hidden_size=2048 model.ffn_hidden_size=8192",
        (*TINY, "parallel=dp2"),
    ),
    "checkpoint.free_disk": Case(
        "model=llama3_8b model.num_layers=16 train.steps=100 checkpoint.interval=10 checkpoint.keep_last=4",
        "model=llama3_8b model.num_layers=16 train.steps=100 checkpoint.interval=10 checkpoint.keep_last=2",
        ("recipe=tiny", "data.corpus=x", "parallel=dp1", "tokenizer.vocab_size=128256"),
    ),
}
