"""Fill a folder with the packages that a GPU machine without network may lack, for `scripts/bench gpu`.

Run it as `scripts/bench gpu_wheels [--out DIR]` on a machine with a network, and copy DIR with the checkout. It holds
unpacked wheels of pure Python (12 MB), at the versions of constraints.txt, so that any Python from 3.11 on imports them
from PYTHONPATH; torch, triton, transformers, numpy and what else is compiled belong to the machine.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from gpu_parts.setting import ROOT, WHEELS

PACKAGES = (
    *("hydra-core", "omegaconf", "antlr4-python3-runtime", "typer", "click", "liger-kernel==0.8.5"),
    *("pytest", "pytest-xdist", "execnet", "pluggy", "iniconfig", "pygments"),
)
"""What is carried: what is rarely installed, what of another version would change the command line, and what runs the
tests in several processes.

Liger is no dependency of megalaunch, so that constraints.txt has no version of it.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Fill the folder; exit 1 if pip fails or a package is not pure Python."""
    parser = argparse.ArgumentParser(prog="scripts/bench gpu_wheels", description="carry packages to a GPU machine")
    parser.add_argument("--out", type=Path, default=WHEELS, help="the folder, which is replaced (build/gpu_wheels)")
    folder = parser.parse_args(arguments).out
    if folder.exists() and any(folder.iterdir()) and not any(folder.glob("hydra_core-*.dist-info")):
        print(f"{folder} holds other files and would be replaced; name another folder with --out", file=sys.stderr)
        return 1
    shutil.rmtree(folder, ignore_errors=True)
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target", str(folder)]
    done = subprocess.run([*command, "-c", str(ROOT / "constraints.txt"), *PACKAGES], check=False)
    if done.returncode != 0:
        print("pip failed: this needs a network and a package index", file=sys.stderr)
        return 1
    shutil.rmtree(folder / "bin", ignore_errors=True)
    if compiled := compiled_packages(folder):
        print(f"not pure Python, and bound to this machine: {', '.join(compiled)}", file=sys.stderr)
        return 1
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    print(f"{folder}: {len(PACKAGES)} packages, {size / 1e6:.1f} MB")
    return 0


def compiled_packages(folder: Path) -> list[str]:
    """Return the packages in a folder whose wheels are not pure Python."""
    return sorted(
        wheel.parent.name.removesuffix(".dist-info")
        for wheel in folder.glob("*.dist-info/WHEEL")
        if "Root-Is-Purelib: true" not in wheel.read_text(encoding="utf-8")
    )


if __name__ == "__main__":
    sys.exit(main())
