"""Workers forked by a process of one thread share memory with it; the bytes are those of one process."""

import json
import os
import subprocess
import sys

import numpy as np
from token_files import sentences, small_tokenizer

from megalaunch.data.preprocess.encode_chunk import Encoded, EncodedKey
from megalaunch.data.preprocess.encoder_pool import SharedBuffers

# Prints how many of the chunks lay in shared memory, and how many did not.
RUN = """
import sys
from pathlib import Path
from megalaunch.data.preprocess import encoder_pool
from megalaunch.data.preprocess.preprocess import preprocess
from megalaunch.data.preprocess.settings import OnBadRecord, Settings

found = []
real = encoder_pool.SharedBuffers.read
encoder_pool.SharedBuffers.read = lambda self, slot, *args: (found.append(slot), real(self, slot, *args))
settings = Settings(Path(sys.argv[2]), workers=int(sys.argv[4]), chunk_bytes=1000, json_keys=("text", "more"),
                    append_eod=True, on_bad_record=OnBadRecord.QUARANTINE)
chunks = []
preprocess([sys.argv[1]], Path(sys.argv[3]), settings, lambda progress: chunks.append(progress.documents))
print(len(found), len(chunks) - len(found), len(set(found)))
"""

# The same with an engine that gives wrong ids in place of gigatoken: that shows when the first chunks are under way.
WRONG = """
from megalaunch.data.preprocess import encoder_backend, encoder_pool

right = encoder_pool.make_encoder


def wrong(name, content):
    encode = right("tokenizers", content)
    return (lambda text: encode(text)[::-1].copy()) if name == "gigatoken" else encode


encoder_backend.make_encoder = encoder_pool.make_encoder = wrong
begun = []
prefetch = encoder_pool.EncoderPool.prefetch
encoder_pool.EncoderPool.prefetch = lambda self, *args: (prefetch(self, *args), begun.extend(self._pending))
"""


def run(folder, workers, script=RUN, engine=""):
    command = [folder / "in.jsonl", folder / "tokenizer.json", folder / f"{workers}{engine}" / "out", workers]
    return subprocess.run(
        [sys.executable, "-c", script, *map(str, command)],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
        env={**os.environ, "OPENBLAS_NUM_THREADS": "1"},
    ).stdout


def test_chunks_begun_with_an_engine_that_proves_wrong_are_encoded_anew(tmp_path):
    small_tokenizer(tmp_path / "tokenizer.json")
    lines = [json.dumps({"text": text, "more": text[:9]}) for text in sentences(600)]
    (tmp_path / "in.jsonl").write_text("\n".join(lines), encoding="utf-8")
    printed = run(tmp_path, 2, WRONG + RUN + "print(len(begun))", "wrong")
    found, sent, slots, begun = map(int, printed.split())
    assert begun == slots - 1 == 8  # all places but the spare one
    assert found > 4 * begun
    assert not sent
    run(tmp_path, 1)
    for name in ("out_text_document.bin", "out_text_document.idx", "out_more_document.bin"):
        assert (tmp_path / "2wrong" / name).read_bytes() == (tmp_path / "1" / name).read_bytes()


def test_the_bytes_of_one_process(tmp_path):
    small_tokenizer(tmp_path / "tokenizer.json")
    lines = [json.dumps({"text": text, "more": text[:9]}) for text in [*sentences(600), "", "x"]]
    lines[100] = '{"text": 7, "more": "bad"}'
    lines[300] = json.dumps({"text": "\u4e2d" * 20_000, "more": ""})  # more tokens than a slot holds
    (tmp_path / "in.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    printed = {workers: [int(figure) for figure in run(tmp_path, workers).split()] for workers in (1, 2)}
    shared, sent, slots = printed[2]
    assert shared > 10 * sent > 0
    assert shared > slots > 1  # each is used again
    assert printed[1][0] == 0
    for name in ("out_text_document.bin", "out_text_document.idx", "out_more_document.bin", "out_quarantine.jsonl"):
        one, two = ((tmp_path / str(workers) / name).read_bytes() for workers in (1, 2))
        assert one
        assert one == two


def test_a_slot_holds_the_tokens_of_all_keys_or_none():
    slots = SharedBuffers(3, 12)
    some = [np.array([1, 2, 65_535], np.uint32), np.array([], np.uint32), np.array([4], np.uint32)]
    nothing = np.empty(0, np.int32)
    encoded = Encoded(keys=[EncodedKey(tokens, nothing, nothing) for tokens in some])
    sizes = slots.write(1, encoded, np.dtype(np.uint16))
    assert sizes == [3, 0, 1]
    assert [key.tokens.size for key in encoded.keys] == [0, 0, 0]
    slots.read(1, encoded, sizes)
    assert [key.tokens.tolist() for key in encoded.keys] == [[1, 2, 65_535], [], [4]]
    large = Encoded(keys=[EncodedKey(np.arange(7, dtype=np.uint16), nothing, nothing)])
    assert slots.write(0, large, np.dtype(np.uint16)) is None
    assert large.keys[0].tokens.size == 7
    taken = {slots.take() for _ in range(3)}
    assert taken == {0, 1, 2}
    slots.free(2)
    assert slots.take() == 2
