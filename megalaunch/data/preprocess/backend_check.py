"""Texts for which two encoder backends must give the same ids before the faster one is used."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

from megalaunch.data.tokenizer.tokenizer import Tokenizer

# Characters of the first documents that both backends encode before gigatoken is used.
CHECKED_CHARACTERS = 100_000
# Texts that occur in corpora and on which tokenizers differ; the vocabulary's special tokens are also checked.
_PROBES = (
    "",
    " ",
    "\n\n  \t x\r\n",
    "I'll we'VE they're 'S",
    "1 22 333 4444 1234567890 3.14",
    "x\u00b2 \u00bd \u2167 \u0661\u0662 \u4e94 \U0001d7d8",
    "a\u0301 \u00e9 \u1e9b\u0323 \ufb01 \u2126",
    "\u4e2d\u6587\u8a9e \ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \ufeff\u00a0\u2028\u3000",
    "__init__(self, **kwargs)  # ----- =====\n\tif x!=y:return{}\n",
    "\x00\x07\x1b[0m \x7f",
)

Checked: TypeAlias = list[tuple[str, list[int]]]


def reference_ids(tokenizer: Tokenizer, texts: Sequence[str]) -> Checked:
    """Return the probes and the start of `texts`, each with its ids by `tokenizers`."""
    checked = [*_PROBES, *(f"a{name}b {name}" for name in tokenizer.special_tokens()[:20])]
    left = CHECKED_CHARACTERS
    for text in texts:
        checked.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    return list(zip(checked, tokenizer.encode_batch(checked), strict=True))
