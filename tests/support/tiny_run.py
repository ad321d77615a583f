"""A finished run with a tiny model, made without training: what generation and the commands need of one."""

from __future__ import annotations

from pathlib import Path

import torch

from megalaunch.data.tokenizer.tokenizer import Tokenizer, train_tokenizer
from megalaunch.engine.checkpoint.store import save_checkpoint
from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.decoder import Decoder
from megalaunch.engine.model.init import init_weights
from megalaunch.rundir.checkpoint.contents import SPEC_FILE, TOKENIZER_FILE, WEIGHTS
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema import RunSpec, build_run_spec
from megalaunch.schema.spec_file import write_spec

TEXT = "the cat sat on the mat, the dog lay by the door; näh, hören wir auf. " * 20


def tiny_spec(**model: object) -> RunSpec:
    """2 layers, hidden 32, 4 heads in 2 groups, 300 tokens."""
    shape = {
        "num_layers": 2,
        "hidden_size": 32,
        "ffn_hidden_size": 48,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "head_dim": 8,
        "vocab_size": 300,
        "init_std": 0.3,  # wide, so that the logits differ
    }
    return build_run_spec(
        {
            "model": shape | model,
            "batch": {"sequence_length": 64, "global_batch_size": 2},
            "precision": {"compute_dtype": "fp32"},
            "train": {"steps": 1},
            "data": {"corpus": "unused"},
        }
    )


def tiny_decoder(**model: object) -> Decoder:
    """An initialised decoder of `tiny_spec`."""
    decoder = build_decoder(tiny_spec(**model).model)
    init_weights(decoder, seed=7)
    return decoder.eval()


def tiny_tokenizer(folder: Path) -> tuple[Tokenizer, Path]:
    """A byte-level BPE of at most 300 tokens, and its file."""
    path = folder / "tiny-tokenizer.json"
    return train_tokenizer([TEXT], 300, path), path


def make_run(root: Path, steps: tuple[int, ...] = (10, 20), **model: object) -> RunDirectory:
    """A run directory with a checkpoint for each step; the weights differ from step to step."""
    run = RunDirectory(root)
    run.checkpoints.mkdir(parents=True)
    write_spec(tiny_spec(**model), run.spec)
    _, tokenizer = tiny_tokenizer(root)
    for step in steps:
        decoder = build_decoder(tiny_spec(**model).model)
        init_weights(decoder, seed=step)
        weights = {WEIGHTS + name: parameter.detach() for name, parameter in decoder.named_parameters()}
        moments = {f"optimizer.exp_avg.{name}": torch.zeros_like(p) for name, p in decoder.named_parameters()}
        files = {SPEC_FILE: run.spec, TOKENIZER_FILE: tokenizer}
        save_checkpoint(run.checkpoint(step), weights | moments, {"position": {"step": step, "tokens": 0}}, files)
    return run
