"""What turns a text into ids: `tokenizers`, or gigatoken where it gives the same ids many times faster."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from megalaunch.data.errors import DataError
from megalaunch.data.preprocess_settings import EngineChoice
from megalaunch.data.tokenizer import Tokenizer, tokenizer_of_json

Encode: TypeAlias = Callable[[str], NDArray[Any]]

# Characters of the first documents that both engines encode before gigatoken is trusted.
CHECKED_CHARACTERS = 100_000
# What text corpora hold and tokenizers differ on; the special tokens of the vocabulary are tried besides.
_PROBES = (
    "",
    " ",
    "\n\n  \t x\r\n",
    "I'll we'VE they're 'S",
    "1 22 333 4444 1234567890 3.14",
    "a\u0301 \u00e9 \u1e9b\u0323 \ufb01 \u2126",
    "\u4e2d\u6587\u8a9e \ud55c\uad6d\uc5b4 \u65e5\u672c\u8a9e",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u0928\u092e\u0938\u094d\u0924\u0947",
    "\U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f3f3\ufe0f\u200d\U0001f308 \ufeff\u00a0\u2028\u3000",
    "__init__(self, **kwargs)  # ----- =====\n\tif x!=y:return{}\n",
    "\x00\x07\x1b[0m \x7f",
)


@dataclass(frozen=True)
class Engine:
    """The engine that was chosen, and why not the faster one (empty: it is the faster one, or was asked for)."""

    name: EngineChoice
    note: str = ""


# Starts to encode texts with gigatoken, and gives what waits for the ids of each, or for why it cannot.
StartGigatoken: TypeAlias = Callable[[list[str]], Callable[[], "list[NDArray[Any]] | str"]]


def choose_engine(
    asked: EngineChoice, tokenizer: Tokenizer, texts: Sequence[str], start: StartGigatoken | None = None
) -> Engine:
    """gigatoken when it is installed, loads the tokenizer and gives the ids of `tokenizers` for probes and `texts`.

    `start` has another process do its part meanwhile. Raises DataError when gigatoken was asked for by name and
    cannot be used.
    """
    if asked is EngineChoice.TOKENIZERS:
        return Engine(EngineChoice.TOKENIZERS)
    reason = _why_not_gigatoken(tokenizer, texts, start or _started_here(tokenizer))
    if not reason:
        return Engine(EngineChoice.GIGATOKEN)
    if asked is EngineChoice.GIGATOKEN:
        raise DataError(f"gigatoken cannot encode this: {reason}", fix="Give --engine auto or tokenizers.")
    return Engine(EngineChoice.TOKENIZERS, f"encoding with tokenizers, about ten times slower: {reason}")


def gigatoken_ids(
    content: str, texts: Sequence[str], load: Callable[[EngineChoice, str], Encode] | None = None
) -> list[NDArray[Any]] | str:
    """The ids that gigatoken gives for each text, or why it cannot; `content` is that of a tokenizer.json.

    `load` stands in for `encoder_of`.
    """
    try:
        return [*map((load or encoder_of)(EngineChoice.GIGATOKEN, content), texts)]
    except ImportError:
        return "gigatoken is not installed (pip install 'megalaunch[data]' brings it)"
    except BaseException as error:  # its Rust code panics with a class of its own below BaseException
        if isinstance(error, KeyboardInterrupt | SystemExit):
            raise
        return f"gigatoken does not take this tokenizer ({_first_line(error)})"


def _started_here(tokenizer: Tokenizer) -> StartGigatoken:
    return lambda texts: partial(gigatoken_ids, tokenizer.to_json(), texts)


def _why_not_gigatoken(tokenizer: Tokenizer, texts: Sequence[str], start: StartGigatoken) -> str:
    checked = [*_PROBES, *(f"a{name}b {name}" for name in tokenizer.special_tokens()[:20])]
    left = CHECKED_CHARACTERS
    for text in texts:
        checked.append(text[:left])
        left -= len(text)
        if left <= 0:
            break
    finish = start(checked)
    expected = tokenizer.encode_batch(checked)
    found = finish()
    if isinstance(found, str):
        return found
    for text, ours, theirs in zip(checked, expected, found, strict=True):
        if not np.array_equal(np.array(ours, np.int64), theirs.astype(np.int64)):
            return f"gigatoken gives other ids for {text[:40]!r}"
    return ""


def encoder_of(name: EngineChoice, content: str) -> Encode:
    """The encoding function of an engine for the tokenizer.json `content`.

    One text a call stays on one thread: the worker processes are the parallelism. Raises ImportError
    without the package, and whatever gigatoken raises for a tokenizer that it does not take.
    """
    if name is EngineChoice.GIGATOKEN:
        import gigatoken

        encode: Encode = gigatoken.Tokenizer.from_json(content.encode()).encode
        return encode
    tokenizer = tokenizer_of_json(content)
    return lambda text: np.array(tokenizer.encode_batch([text])[0], dtype=np.uint32)


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]
