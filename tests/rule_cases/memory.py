"""The case of the rule of devices' memory."""

from rule_cases.case import Case

CASES = {
    "memory.fits": Case("batch.micro_batch_size=4", "batch.micro_batch_size=1", ("recipe=llama3_8b", "data.corpus=x")),
}
