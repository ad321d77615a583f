"""Start-up times of the commands that must feel instant, against their bars.

Run it as `scripts/bench startup [--runs N]`; exit 1 when a median misses its bar. The bars are for an idle machine; the
CPU time in the next column shows what other work on it has added. The last line is a ratio of CPU times of one run:
validate-config against Hydra alone, which composes the same files.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path

import yaml

from megalaunch.config.parallel_names import layout_values

ROOT = Path(__file__).resolve().parents[2]
MEGALAUNCH = [sys.executable, str(Path(sys.executable).with_name("megalaunch"))]


def seconds(command: list[str], folder: str, environment: Mapping[str, str]) -> tuple[float, float]:
    """Return wall and CPU time of one run of a command, which must succeed."""
    started, used = time.perf_counter(), _cpu_seconds()
    done = subprocess.run(
        command, cwd=folder, env=os.environ | dict(environment), capture_output=True, text=True, check=False
    )
    taken = time.perf_counter() - started
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed (exit {done.returncode}):\n{done.stderr or done.stdout}")
    return taken, _cpu_seconds() - used


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


HYDRA_ALONE = """
import sys
from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from omegaconf import OmegaConf
from megalaunch.config.hydra.structured import NAME, structured_run_spec

ConfigStore.instance().store(name=NAME, node=structured_run_spec())
with initialize_config_dir(sys.argv[1], version_base="1.3"):
    config = compose("config", [f"hydra.searchpath=[file://{sys.argv[2]}]", sys.argv[3]])
OmegaConf.to_container(config, resolve=True)
"""
COMPOSED = "recipe=llama3_70b"
RATIO_BAR = 1.6
SHELL = {"_MEGALAUNCH_COMPLETE": "complete_zsh", "_TYPER_COMPLETE_ARGS": "megalaunch train recipe=ll"}
LAYOUT = ["parallel=tp4pp4", "cluster.nodes=2", "cluster.devices_per_node=8"]
ROWS: dict[str, tuple[list[str], float | None]] = {
    # what is timed: its arguments after `megalaunch`, and its bar in seconds
    "megalaunch --version": (["--version"], None),
    "megalaunch --help": (["--help"], 0.25),
    "TAB after train recipe=ll": ([], 0.3),
    "recipes list": (["recipes", "list"], 0.6),
    "validate-config recipe=quickstart": (["validate-config", "recipe=quickstart"], 0.6),
    "validate-config recipe=llama3_8b parallel=tp4pp4": (["validate-config", "recipe=llama3_8b", *LAYOUT], 0.6),
    f"validate-config {COMPOSED}": (["validate-config", COMPOSED], 0.6),
    "validate-config recipe=deepseek_v3": (["validate-config", "recipe=deepseek_v3"], 0.6),
    "plan recipe=llama3_8b parallel=tp4pp4": (["plan", "recipe=llama3_8b", *LAYOUT], 0.8),
    "plan recipe=deepseek_v3": (["plan", "recipe=deepseek_v3"], 0.8),
}


def main() -> int:
    """Measure all commands in turns, so that a slow moment of the machine meets each of them."""
    parser = argparse.ArgumentParser(description="start-up times against their bars")
    parser.add_argument("--runs", type=int, default=15, help="runs of each command; the median counts (15)")
    runs = parser.parse_args().runs
    commands = {name: [*MEGALAUNCH, *arguments] for name, (arguments, _) in ROWS.items()}
    commands["scripts/run --version"] = [str(ROOT / "scripts" / "run"), "--version"]
    commands["Hydra alone"] = [sys.executable, "-c", HYDRA_ALONE, str(ROOT / "conf"), "files", COMPOSED]
    times: dict[str, list[float]] = {name: [] for name in commands}
    cpu_times: dict[str, list[float]] = {name: [] for name in commands}
    with tempfile.TemporaryDirectory() as folder:
        commands["Hydra alone"][-2] = files_for_hydra(Path(folder))
        for turn in range(runs + 1):
            for name, arguments in commands.items():
                taken, used = seconds(arguments, folder, SHELL if name.startswith("TAB") else {})
                if turn > 0:  # the first warms the file cache
                    times[name].append(taken)
                    cpu_times[name].append(used)
    plain = times["megalaunch --version"]
    overhead = [with_run - without for with_run, without in zip(times["scripts/run --version"], plain, strict=True)]
    rows = [(name, times[name], bar, cpu_times[name]) for name, (_, bar) in ROWS.items() if bar is not None]
    rows.append(("scripts/run, on top of megalaunch", overhead, 0.1, []))
    print(f"{'seconds, ' + str(runs) + ' runs':50} {'median':>7} {'min':>7} {'max':>7} {'cpu':>7} {'bar':>7}")
    missed = 0
    for name, taken, bar, used_by in rows:
        median = statistics.median(taken)
        missed += median >= bar
        verdict = "" if median < bar else "  missed"
        cpu = f"{statistics.median(used_by):7.3f}" if used_by else " " * 7
        print(f"{name:50} {median:7.3f} {min(taken):7.3f} {max(taken):7.3f} {cpu} {bar:7.3f}{verdict}")
    ratio = statistics.median(cpu_times[f"validate-config {COMPOSED}"]) / statistics.median(cpu_times["Hydra alone"])
    print(f"CPU time of validate-config {COMPOSED} / Hydra alone: {ratio:.2f} (bar {RATIO_BAR})")
    return 1 if missed or ratio > RATIO_BAR else 0


def files_for_hydra(folder: Path) -> str:
    """Make a search path with the recipes as a config group, and a file for the layout name of the composed one."""
    (folder / "recipe").symlink_to(ROOT / "recipes")
    (folder / "parallel").mkdir()
    text = (ROOT / "recipes" / f"{COMPOSED.partition('=')[2]}.yaml").read_text()
    layout = text.partition("override /parallel: ")[2].split()[0]
    (folder / "parallel" / f"{layout}.yaml").write_text(yaml.safe_dump(layout_values(layout)))
    return str(folder)


if __name__ == "__main__":
    sys.exit(main())
