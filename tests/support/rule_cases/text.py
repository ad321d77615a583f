"""Cases of the rules of where text comes from, and how it is mixed and shaped: breaks and near misses."""

from rule_cases.case import TINY, Case

PREPARED = ("recipe=tiny", "data.corpus=null", "tokenizer.path=TOKENIZER")
MOCK = ("recipe=tiny", "data.corpus=null", "data.mock=true", "train.sample_prompt=null", "train.sample_tokens=64")
CASES = {
    "data.validation_twice": Case(
        "data.validation_prefix=PREFIX data.validation_blend=[PREFIX]",
        "data.validation_prefix=PREFIX",
        (*PREPARED, "data.train_prefix=PREFIX"),
    ),
    "data.stored_ids": Case(
        "model.vocab_size=65537", "model.vocab_size=65536", (*PREPARED, "data.train_prefix=SIXTEEN_BITS")
    ),
    "data.blend_form": Case("data.blend=['0.3']", "data.blend=['0.3~PREFIX']", PREPARED),
    "data.blend_weights": Case(
        "data.blend=['0.3~PREFIX','OTHER']", "data.blend=['0.3~PREFIX','0.2~OTHER']", PREPARED
    ),
    "data.blend_positive": Case("data.blend=['0~PREFIX']", "data.blend=['0.1~PREFIX']", PREPARED),
    "data.blend_twice": Case("data.blend=['PREFIX','PREFIX']", "data.blend=['PREFIX','OTHER']", PREPARED),
    "data.validation_seen": Case(
        "data.validation_blend=[PREFIX]", "data.validation_blend=[OTHER]", (*PREPARED, "data.train_prefix=PREFIX")
    ),
    "data.split_form": Case("data.split=a,b", "data.split=90,10", (*PREPARED, "data.train_prefix=PREFIX")),
    "data.split_trains": Case("data.split=0,1", "data.split=1,0", (*PREPARED, "data.train_prefix=PREFIX")),
    "data.split_idle": Case("data.split=90,10", "data.split=null"),
    "data.validation_blend_idle": Case(
        "data.validation_blend=[PREFIX]", "data.validation_blend=[]", (*MOCK, "model.vocab_size=320")
    ),
    "data.template_idle": Case(
        "data.chat_template=llama3", "data.chat_template=llama3 data.sft_data=x data.corpus=null"
    ),
    "data.documents_idle": Case(
        "data.eod_mask_loss=true data.sft_data=x data.corpus=null", "data.eod_mask_loss=true"
    ),
    "data.fim_idle": Case(
        "data.fim_spm_rate=0.1", "data.fim_spm_rate=0.1 data.fim_rate=0.5 tokenizer.path=TOKENIZER"
    ),
    "data.fim_mock": Case("data.fim_rate=0.5", "data.fim_rate=0", (*MOCK, "model.vocab_size=320")),
    "data.fim_tokenizer": Case("data.fim_rate=0.5", "data.fim_rate=0.5 tokenizer.path=TOKENIZER"),
    "data.fim_marks": Case(
        "data.fim_tokens=[a,b]", "data.fim_tokens=[a,b,c]", (*TINY, "tokenizer.path=TOKENIZER", "data.fim_rate=0.5")
    ),
    "data.documents_end": Case("data.eod_mask_loss=true data.append_eod=false", "data.eod_mask_loss=true"),
    "data.positions_apart": Case(
        "data.reset_position_ids=true", "data.reset_position_ids=true data.reset_attention_mask=true"
    ),
}  # fmt: skip
