"""How fast text is written, against transformers' `generate` on the same weights, in turns within one run.

Run it as `scripts/bench generate HF_DIR [--batch 1 8] [--tokens N] [--turns N] [--threads N]`; exit 1 when a bar is
missed or greedy tokens differ. Both sides compute in fp32, greedily, and always write all tokens. Ratios of processor
time hold on a busy machine better than those of time.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megalaunch.engine import api
from megalaunch.engine.inference.generate import GenerationConfig, TextModel, generate_tokens
from megalaunch.engine.inference.sampling import Sampling

BAR, PROMPT = 1.3, 24


def ours(model: TextModel, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    """The new tokens [B, N]."""
    writing = GenerationConfig(tokens, Sampling(temperature=0))
    return torch.stack([drawn.tokens_B for drawn in generate_tokens(model, prompts.tolist(), writing)], dim=1)


def theirs(model: Any, prompts: torch.Tensor, tokens: int) -> torch.Tensor:
    """The new tokens [B, N]."""
    mask = torch.ones_like(prompts)
    settings = {"max_new_tokens": tokens, "min_new_tokens": tokens, "do_sample": False, "pad_token_id": 0}
    return model.generate(prompts, attention_mask=mask, **settings)[:, prompts.shape[1] :]


def timed(write: Callable[[], torch.Tensor]) -> tuple[float, float, torch.Tensor]:
    """Seconds, seconds of the processor, and the tokens."""
    started, worked = time.perf_counter(), time.process_time()
    written = write()
    return time.perf_counter() - started, time.process_time() - worked, written


def compare(batch: int, sides: dict[str, Callable[[torch.Tensor, int], torch.Tensor]], tokens: int, turns: int) -> bool:
    """Print both sides' rates at one batch size; False when the bar is missed or texts differ."""
    prompts = torch.randint(20, 40_000, (batch, PROMPT), generator=torch.Generator().manual_seed(1))
    for write in sides.values():
        write(prompts, 4)
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    worked: dict[str, list[float]] = {name: [] for name in sides}
    same = True
    for _ in range(turns):
        texts = []
        for name, write in sides.items():
            taken, cpu, written = timed(lambda write=write: write(prompts, tokens))
            seconds[name].append(taken)
            worked[name].append(cpu)
            texts.append(written)
        same &= torch.equal(*texts)
    rates = {name: batch * tokens / statistics.median(taken) for name, taken in seconds.items()}
    ratio = rates["ours"] / rates["transformers"]
    cpu_ratio = statistics.median(worked["transformers"]) / statistics.median(worked["ours"])
    missed = "" if ratio >= BAR else "  missed"
    shown = "".join(f"{rates[name]:14.1f}" for name in ("ours", "transformers"))
    print(f"{batch:5}{shown}{ratio:9.2f}{cpu_ratio:12.2f}{'' if same else '  tokens differ'}{missed}", flush=True)
    return same and not missed


def main() -> int:
    """All batch sizes."""
    parser = argparse.ArgumentParser(description="tokens a second against transformers")
    parser.add_argument("folder", type=Path, help="a Hugging Face folder with a tokenizer")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--tokens", type=int, default=40, help="new tokens a text (40)")
    parser.add_argument("--turns", type=int, default=5, help="turns of each side (5)")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    other = transformers.AutoModelForCausalLM.from_pretrained(options.folder, dtype=torch.float32).eval()
    model = api.open_model(options.folder).decoder
    sides = {
        "transformers": lambda prompts, tokens: theirs(other, prompts, tokens),
        "ours": lambda prompts, tokens: ours(model, prompts, tokens),
    }
    print(f"torch {torch.__version__}, transformers {transformers.__version__}, {options.threads} threads, ", end="")
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; tokens a second")
    print(f"{'batch':>5}{'ours':>14}{'transformers':>14}{'ratio':>9}{'processor':>12}")
    held = [compare(batch, sides, options.tokens, options.turns) for batch in options.batch]
    return 0 if all(held) else 1


if __name__ == "__main__":
    sys.exit(main())
