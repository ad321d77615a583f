"""Samples of one's own iterator in a training step: a Hugging Face data set, or anything else that yields texts.

    torchrun --nproc-per-node 2 own_data.py corpus.jsonl tokenizer.json recipe=tiny parallel=tp2 train.steps=5

Ranks that differ only in tp, cp or pp must read the same samples: choose them by `mesh.dp_rank` of `mesh.dp_size`.
"""

import sys
from collections.abc import Iterable, Iterator
from itertools import islice

import datasets
import numpy as np
import tokenizers

import megalaunch as ml


def pack(texts: Iterable[str], tokenizer: tokenizers.Tokenizer, length: int) -> Iterator[ml.Sample]:
    """Yield the texts as samples of `length` tokens, one after the other; the last token is the next one's first."""
    tokens: list[int] = []
    for text in texts:
        tokens += tokenizer.encode(text).ids
        while len(tokens) > length:
            yield ml.Sample(np.array(tokens[: length + 1]))
            tokens = tokens[length:]


def main() -> None:
    """Train a few steps on a file of JSON lines."""
    corpus, tokenizer_file, *overrides = sys.argv[1:]
    tokenizer = tokenizers.Tokenizer.from_file(tokenizer_file)
    spec = ml.compose([*overrides, f"model.vocab_size={tokenizer.get_vocab_size()}"])
    texts = datasets.load_dataset("json", data_files=corpus, split="train", streaming=True)
    with ml.initialize(spec) as mesh:
        model = ml.build_sharded_model(spec, mesh)
        passes = ml.make_forward_backward(spec, mesh, model)
        optimizer = ml.Optimizer(model, spec.optimizer, spec.precision)
        step = ml.TrainStep(spec, mesh, model, passes, optimizer)
        own_texts = (row["text"] for number, row in enumerate(texts) if number % mesh.dp_size == mesh.dp_rank)
        samples = pack(own_texts, tokenizer, spec.batch.sequence_length)
        of_a_step = spec.batch.global_batch_size // mesh.dp_size
        for number in range(1, spec.train.steps + 1):
            first = ((number - 1) * mesh.dp_size + mesh.dp_rank) * of_a_step
            batch = ml.make_batch(spec, mesh, list(islice(samples, of_a_step)), first)
            result = step.run(number, batch)
            if mesh.rank == 0:
                print(f"step {number:3}  loss {result.loss:.4f}", flush=True)


if __name__ == "__main__":
    main()
