"""The one model, batch and optimizer that all variants compute."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from megalaunch.engine.model.build import build_decoder
from megalaunch.engine.model.init import init_weights
from megalaunch.schema import RunSpec, build_run_spec

LAYERS, HIDDEN, FFN, HEADS, GROUPS, VOCABULARY = 4, 512, 1408, 8, 4, 4096
HEAD_DIM = HIDDEN // HEADS
EPSILON, THETA = 1e-5, 10_000.0
RATE, BETAS, ADAM_EPSILON, DECAY, CLIP = 1e-4, (0.9, 0.95), 1e-8, 0.1, 1.0
SEED = 7


@dataclass(frozen=True)
class Work:
    """What a rank computes in a step: `samples` of `tokens` each, in `precision` (fp32 or bf16)."""

    samples: int
    tokens: int
    precision: str

    def spec(self, **parallel: object) -> RunSpec:
        """A resolved run of it."""
        ranks = int(str(parallel.get("dp", 1))) * int(str(parallel.get("tp", 1)))
        return build_run_spec(
            {
                "model": {
                    "num_layers": LAYERS,
                    "hidden_size": HIDDEN,
                    "ffn_hidden_size": FFN,
                    "num_attention_heads": HEADS,
                    "num_query_groups": GROUPS,
                    "head_dim": HEAD_DIM,
                    "vocab_size": VOCABULARY,
                    "norm_epsilon": EPSILON,
                    "rope": {"theta": THETA},
                },
                "parallel": {"dp": 1, **parallel},
                "precision": {"compute_dtype": self.precision},
                "platform": {"chip": "cpu"},
                "cluster": {"nodes": 1, "devices_per_node": ranks},
                "optimizer": {
                    "lr": RATE,
                    "beta1": BETAS[0],
                    "beta2": BETAS[1],
                    "epsilon": ADAM_EPSILON,
                    "weight_decay": DECAY,
                    "clip_grad": CLIP,
                },
                "schedule": {"shape": "constant", "warmup_steps": 0, "decay_steps": 10_000},
                "batch": {
                    "sequence_length": self.tokens,
                    "micro_batch_size": self.samples,
                    "global_batch_size": self.samples * int(str(parallel.get("dp", 1))),
                },
                "train": {"steps": 10_000, "seed": SEED},
            }
        )

    def batch(self, share: int = 0) -> tuple[Tensor, Tensor]:
        """Random inputs and labels [samples, tokens] of one data-parallel share; the same every step."""
        rows = np.random.default_rng(share).integers(0, VOCABULARY, (self.samples, self.tokens + 1))
        both = torch.from_numpy(rows)
        return both[:, :-1].contiguous(), both[:, 1:].contiguous()

    @property
    def dtype(self) -> torch.dtype:
        """The format of matmuls."""
        return torch.bfloat16 if self.precision == "bf16" else torch.float32


def weights() -> Iterator[tuple[str, Tensor]]:
    """Initial weights by our names, the same for every variant."""
    decoder = build_decoder(Work(1, 8, "fp32").spec().model)
    init_weights(decoder, SEED)
    for name, parameter in decoder.named_parameters():
        yield name, parameter.detach()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """Torch's fastest AdamW with our settings: matrices are decayed, vectors are not."""
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=RATE, betas=BETAS, eps=ADAM_EPSILON, fused=True)
