"""The models, sequence lengths and precisions whose training steps are timed, as overrides of a recipe."""

from __future__ import annotations

from dataclasses import dataclass, replace

from gpu_parts.setting import Setting
from megalaunch.config.compose import compose
from megalaunch.plan.resolve import resolve
from megalaunch.platform.detect import detect_machine
from megalaunch.schema import RunSpec

_TOKENS_PER_CHUNK = 2048  # of the loss
_SMALL_MODEL = (
    "model.num_layers=2",
    "model.hidden_size=64",
    "model.ffn_hidden_size=96",
    "model.num_attention_heads=4",
    "model.head_dim=16",
    "model.vocab_size=512",
)


@dataclass(frozen=True)
class Workload:
    """Training steps of one model, `samples` of `sequence` tokens in a microbatch, `microbatches` of them in a step.

    With `graphs` its layers are captured as CUDA graphs on a GPU, in place of compiled.
    """

    model: str
    overrides: tuple[str, ...]
    small_overrides: tuple[str, ...]
    sequence: int
    samples: int
    microbatches: int
    precision: str = "bf16"
    graphs: bool = False

    @property
    def name(self) -> str:
        """Return the name of the row."""
        return f"{self.model}, {self.sequence}, {self.precision}{', graphs' if self.graphs else ''}"

    def at_size(self, setting: Setting) -> Workload:
        """Return the workload as it is run: with tiny samples in the small mode."""
        return replace(self, sequence=self.sequence // 128, samples=2, microbatches=2) if setting.small else self

    def of_one_layer(self) -> Workload:
        """Return a step of one layer without a vocabulary to speak of, whose layer is compiled as those of this one."""
        overrides = (*self.overrides, "model.num_layers=1", "model.vocab_size=512")
        return replace(self, overrides=overrides, microbatches=1)

    def spec(self, setting: Setting) -> RunSpec:
        """Return the resolved spec of a run of it on one device."""
        at = self.at_size(setting)
        graphs = self.graphs and setting.device == "cuda"
        words = [
            f"precision={self.precision}",
            f"platform={'auto' if setting.device == 'cuda' else 'cpu'}",
            "schedule=constant",
            "data=mock",
            "cluster.nodes=1",
            "cluster.devices_per_node=1",
            "train.steps=1000",
            f"train.compile={str(setting.compile and not graphs).lower()}",
            f"train.cuda_graphs={str(graphs).lower()}",
            f"train.loss_chunks={max(1, at.samples * at.sequence // _TOKENS_PER_CHUNK)}",
            f"batch.sequence_length={at.sequence}",
            f"batch.micro_batch_size={at.samples}",
            f"batch.global_batch_size={at.samples * at.microbatches}",
            *self.overrides,
            *((*_SMALL_MODEL, *self.small_overrides) if setting.small else ()),
        ]
        if self.precision == "fp8" and setting.device != "cuda":
            words.append("precision.emulate=true")
        return resolve(compose(words).spec, detect_machine(), None).spec


_LLAMA = ("model.rope.scaling=none",)
_GROUPS = ("model.num_query_groups=2",)
_SHAPES = {  # (overrides, small overrides), then samples and microbatches at 8192 and 2048 tokens
    "Llama-3.2-1B": (("model=llama32_1b", *_LLAMA), _GROUPS, {8192: (2, 4), 2048: (8, 4)}),
    "8B shape, 4 layers": (("model=llama31_8b", "model.num_layers=4", *_LLAMA), _GROUPS, {8192: (2, 4), 2048: (8, 4)}),
    "8B shape, 8 layers": (("model=llama31_8b", "model.num_layers=8", *_LLAMA), _GROUPS, {8192: (1, 4), 2048: (4, 4)}),
    "GPT-2 124M": (
        # Without dropout, as it is trained today: on scores it takes attention in fp32, six times the time of a step.
        (
            "model=gpt2_124m",
            "model.max_position_embeddings=8192",
            "model.hidden_dropout=0",
            "model.attention_dropout=0",
        ),
        (),
        {8192: (4, 2), 2048: (16, 2)},
    ),
    "Qwen3-30B-A3B shape, 2 layers": (
        ("model=qwen3_30b_a3b", "model.num_layers=2"),
        ("model.num_query_groups=2", "model.moe.num_experts=4", "model.moe.top_k=2", "model.moe.ffn_hidden_size=32"),
        {8192: (2, 2), 2048: (8, 2)},
    ),
}
WORKLOADS: dict[str, Workload] = {
    made.name: made
    for model, (overrides, small, samples) in _SHAPES.items()
    for sequence, (size, count) in samples.items()
    for precision in ("bf16", "fp8")
    for made in [Workload(model, overrides, small, sequence, size, count, precision)]
}
_GRAPHS = replace(WORKLOADS["GPT-2 124M, 2048, bf16"], graphs=True)  # the shortest kernels
WORKLOADS[_GRAPHS.name] = _GRAPHS
