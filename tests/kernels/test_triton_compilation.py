"""Every Triton kernel compiles to machine code of the GPUs it is for, on machines that have none."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
from paths import TESTS

KERNELS = {
    "add and RMSNorm (9, 130) torch.bfloat16": ["_backward", "_forward"],
    "add and LayerNorm (9, 130) torch.bfloat16": ["_backward", "_forward"],
    "RMSNorm (9, 130) torch.bfloat16": ["_backward", "_forward"],
    "LayerNorm (9, 130) torch.bfloat16": ["_backward", "_forward"],
    "rope in bf16": ["_rotate", "_rotate"],
    "geglu (3, 5, 50) torch.bfloat16": ["_backward", "_forward"],
    "geglu_tanh (3, 5, 50) torch.bfloat16": ["_backward", "_forward"],
    "quick_geglu (3, 5, 50) torch.bfloat16": ["_backward", "_forward"],
    "swiglu (1024,) torch.bfloat16": ["_backward", "_forward"],
    "rows in bf16": ["_gather", "_sum", "_sum", "_weigh"],
    "amax of (0, 0) blocks, (130, 200) torch.bfloat16": ["_amax"],
    "amax of (1, 0) blocks, (130, 200) torch.bfloat16": ["_amax"],
    "cast by (1, 32) blocks, (130, 200) torch.bfloat16": ["_cast"],
    "cast with its transpose, (64, 128) torch.float8_e4m3fn": ["_cast"],
    "cast with its transpose, (130, 200) torch.float8_e5m2": ["_cast"],
    "cast of (1, 32) blocks, (130, 200) torch.bfloat16": [
        *("_cast_blocks", "_cast_blocks"),
        *("_cast_blocks_both", "_cast_blocks_both"),
    ],
    "cast of (1, 128) blocks, (130, 200) torch.bfloat16": [
        *("_cast_blocks", "_cast_blocks"),
        *("_cast_blocks_both", "_cast_blocks_both"),
    ],
    "cast of (128, 128) blocks, (192, 96) torch.float16": ["_cast_blocks", "_cast_blocks"],
    "cast with amax": ["_cast", "_cast"],
    "rows times matrices, an expert without rows, 0": ["_rows_times_matrices"],
    "rows times matrices, an expert without rows, 32": ["_rows_times_matrices"],
    "rows times matrices, square blocks": ["_rows_times_matrices"],
    "columns times rows, an expert without rows, 128": ["_columns_times_rows"],
    "columns times rows, scales of experts, 0": ["_columns_times_rows"],
    "loss of 2 x 16387 torch.bfloat16": ["_gradient", "_loss_and_gradient", "_sums"],
    "adamw of torch.float32, torch.float32, torch.bfloat16": ["_adamw"],
    "adamw of torch.bfloat16, torch.bfloat16, torch.float32": ["_adamw"],
    "lion of torch.bfloat16, torch.bfloat16, torch.bfloat16": ["_lion"],
    "adamw, aligned": ["_adamw"],
    "lion of fp32": ["_lion"],
    "loss with a cap": ["_gradient", "_loss_and_gradient", "_sums"],
}
"""Cases of test_triton.py with the kernels that each starts."""


def compiled(capability: int, folder, names: list[str]) -> tuple[dict[str, list[str]], str]:
    """The kernels that a process compiled by case, and what it said."""
    environment = {**os.environ, "PYTHONPATH": str(TESTS / "support"), "TRITON_CACHE_DIR": str(folder)}
    environment.pop("TRITON_INTERPRET", None)
    command = [sys.executable, __file__, str(capability), *names]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    lines = [line.split(": ") for line in run.stdout.splitlines()]
    return {name: kernels.split() for name, kernels in lines}, run.stderr


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_kernels_compile_for_hopper(tmp_path):
    found, said = compiled(90, tmp_path, list(KERNELS))
    assert found == KERNELS, said


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("capability", [89, 120], ids=["Ada", "RTX Blackwell"])
def test_products_of_experts_compile_for_gpus_that_torchs_operator_is_not_for(capability, tmp_path):
    """They multiply in fp8, and fit into less than half of the shared memory of Hopper."""
    products = {name: kernels for name, kernels in KERNELS.items() if " times " in name}
    found, said = compiled(capability, tmp_path, list(products))
    assert found == products, said
    code = [path.read_text() for path in tmp_path.rglob("*.ptx")]
    assert len(code) == len(products)
    assert all(re.search(r"mma\.sync\.aligned\.m16n8k32\S*\.e[45]m[23]\.e[45]m[23]\.", ptx) for ptx in code)


@pytest.mark.slow
@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_casts_to_fp8_are_not_for_ampere(tmp_path):
    """Why float8_cast.py asks for the capability of the device; and a kernel that does not compile is seen."""
    found, said = compiled(80, tmp_path, ["cast with its transpose, (64, 128) torch.float8_e4m3fn"])
    assert not found
    assert "fp8e4nv not supported in this architecture" in said


def compile_cases(capability: int, names: list[str]) -> None:
    """Run the cases, whose kernels compute nothing: what they compare does not hold."""
    from contextlib import suppress

    from test_triton import CASES
    from triton_compilation import compile_for

    driver = compile_for(capability)
    for name in names:
        before = len(driver.compiled)
        with suppress(AssertionError):
            CASES[name](device="cpu")
        print(f"{name}: {' '.join(sorted(driver.compiled[before:]))}", flush=True)


if __name__ == "__main__":
    compile_cases(int(sys.argv[1]), sys.argv[2:])
