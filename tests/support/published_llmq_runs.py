"""Published rates of llmq on one H100, as specs."""

from __future__ import annotations

from published_runs import Published

from megalaunch.plan.cost import LLMQ

# llmq (C++/CUDA) on one H100, 524,288 tokens a step: the only published single-device training rates. Its commands
# (benchmarks/H100x1.md): --model-dtype=bf16, which is the format of master weights, gradients and activations alike;
# moments in bf16; nothing computed again, nothing offloaded. Logits stay in 16 bits there and become their own
# gradients, of all tokens or of 4 (1.5B) and 2 (7B) chunks. Ours are whole in fp32, else in chunks: of 512 tokens.
# Of 14B, whose weight gradient of the head alone takes 3.1 GB in fp32, chunks of 256 tokens fit.
# 14B: --recompute-ffn --offload-opt-m --offload-opt-v --offload-residual. One residual stream of each of 48 layers, 10
# of the 66 kB a token that a layer keeps then, is as much as all that 7.5 layers keep, which is what we can say.
ONE_DEVICE = tuple(
    Published(
        f"Qwen2.5-{size} llmq bf16, 1",
        (f"model=qwen25_{size.lower().replace('.', '_')}",),
        1,
        "dp",
        (1024, micro, 512),
        (
            "precision=bf16",
            "precision.grad_dtype=bf16",
            "precision.grad_reduce_dtype=bf16",
            "precision.main_params_dtype=bf16",
            "precision.exp_avg_dtype=bf16",
            f"train.loss_chunks={(4 if size == '14B' else 2) * micro}",
            *overrides,
        ),
        rate,
        stack=LLMQ,
    )
    for size, micro, rate, overrides in (
        ("0.5B", 32, 149500, ()),
        ("1.5B", 32, 58900, ()),
        ("3B", 16, 30900, ()),
        ("7B", 4, 13850, ()),
        (
            "14B",
            8,
            6330,
            (
                "recompute=selective",
                "recompute.modules=[mlp]",
                "optimizer.optimizer_offload_fraction=1",
                "recompute.cpu_offloading_num_layers=7",
            ),
        ),
    )
)
