"""How much a process grows that encodes text which never repeats, measured in a process that does nothing else."""

import base64
import random
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context

import numpy as np

TEXTS = 8


def growth_in_new_process(content: str, cache_bytes: int) -> tuple[int, int]:
    """Return the most bytes that a new process grew by while it encoded `TEXTS` texts of 1 MiB, and its reloads."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(_growth, content, cache_bytes).result(timeout=120)


def _growth(content: str, cache_bytes: int) -> tuple[int, int]:
    from megalaunch.data.preprocess.gigatoken_encoder import GigatokenEncoder, _private_bytes

    encode = GigatokenEncoder(content, cache_bytes)
    first = encode(_unique_text(0))
    before, most, reloads = _private_bytes(), 0, []
    load = encode._load
    encode._load = lambda: reloads.append(1) or load()
    for number in range(TEXTS):
        encode(_unique_text(number))
        most = max(most, _private_bytes() - before)
    np.testing.assert_array_equal(encode(_unique_text(0)), first)
    return most, len(reloads)


def _unique_text(number: int, size: int = 1 << 20) -> str:
    letters = base64.b64encode(random.Random(number).randbytes(size * 3 // 4)).decode()
    return " ".join(letters[at : at + 12] for at in range(0, len(letters), 12))
