"""A storm of random faults against one run of recipe=tiny, whose end must be that of a run without faults.

`scripts/faults --storm` calls it. Kinds, ranks and moments of the faults follow from the seed.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import shutil
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median

from fault_times import percentiles
from same_run import differences
from struck_run import (
    ENDLESS,
    FEWEST_STEPS,
    KINDS,
    MOST_STEPS,
    RANKS,
    Result,
    Strike,
    StruckRun,
    StruckRunError,
)
from training import train_tiny

from megalaunch.format.table import table_lines
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory

HANGS = 1 / 16  # the share of stopped ranks, each of which takes 12 seconds to be found
MAY_BE_EARLY = ("worker_killed", "agent_killed", "launcher_killed", "preempted")
EARLY = 0.3  # the share of these that strikes while the run restarts after the fault before
LAST_SECONDS = 900.0  # for the fault that strikes last, and the end of the run


def make_schedule(faults: int, seed: int) -> list[Strike]:
    """Draw the faults: rounds of all kinds in random order, with few stopped ranks."""
    source = random.Random(seed)
    kinds = ["rank_stopped"] * int(faults * HANGS)
    others = [kind for kind in KINDS if kind != "rank_stopped"]
    while len(kinds) < faults:
        kinds += source.sample(others, min(len(others), faults - len(kinds)))
    source.shuffle(kinds)
    strikes: list[Strike] = []
    for kind in kinds:
        # A restart is hit once at most: a third failure at the same step would be no progress, and end the run.
        may_be_early = kind in MAY_BE_EARLY and strikes and strikes[-1].steps and strikes[-1].kind != "second_launch"
        early = may_be_early and source.random() < EARLY
        steps = 0 if early else max(FEWEST_STEPS.get(kind, 1), source.randint(1, MOST_STEPS))
        strikes.append(Strike(kind, source.randrange(RANKS), steps, source.random(), source.random() < 0.5))
    return strikes


def run_storm(folder: Path, faults: int, seed: int, minutes: float) -> list[str]:
    """Run a storm in a folder and print its table; return what is wrong with the end of the run.

    After `minutes` no fault strikes any more.
    """
    strikes, results, shared = make_schedule(faults, seed), list[Result](), folder / "shared"
    (folder / "struck").mkdir()
    struck, began = StruckRun(folder / "struck", shared, minutes * 60 + LAST_SECONDS), time.monotonic()
    try:
        struck.launch(async_save=False)
        for number, strike in enumerate(strikes):
            if time.monotonic() - began > minutes * 60:
                break
            is_last = number + 1 == len(strikes)
            results.append(struck.strike(strike, wait=is_last or strikes[number + 1].steps > 0))
            with (folder / "faults.jsonl").open("a") as file:
                file.write(json.dumps(dataclasses.asdict(strike) | dataclasses.asdict(results[-1])) + "\n")
        last_step = struck.finish()
        wall = time.monotonic() - began
        problems = leftovers(struck)
    except StruckRunError as error:
        return [f"fault {len(results) + 1} ({strikes[min(len(results), faults - 1)]}): {error}"]
    finally:
        struck.close()
    if struck.restarts != struck.expected_restarts:
        problems.append(f"{struck.restarts} restarts of the workers, {struck.expected_restarts} faults that need one")
    (folder / "undisturbed").mkdir()
    code, _, err = train_tiny(folder / "undisturbed", *ENDLESS, f"train.exit_at_step={last_step}", shared=shared)
    if code:
        return [*problems, f"the run without faults ended with exit code {code}: {err}"]
    undisturbed = RunDirectory(folder / "undisturbed" / "run")
    usual = median(line["step_seconds"] for line in read_lines(undisturbed.metrics) if "step_seconds" in line)
    print("\n".join(table(results)))
    print(
        f"{len(results)} faults (seed {seed}) in {last_step} steps on {RANKS} ranks and {wall:.0f} s: "
        f"goodput {last_step * usual / wall:.0%}, as a step takes {usual * 1000:.0f} ms without faults"
    )
    return problems or differences(struck.directory, undisturbed, last_step)


def leftovers(struck: StruckRun) -> list[str]:
    """Return the processes, and the files that are no part of a finished run, which a run has left."""
    files = [*struck.directory.root.rglob("*unfinished*"), *struck.temporary.iterdir()]
    files = [file for file in files if not file.name.startswith("torchinductor_")]  # a cache of torch, one a user
    files += [struck.directory.lock] if struck.directory.lock.exists() else []
    processes = [f"process {process.pid} is left" for process in struck.processes()]
    return [*processes, *(f"{file} is left" for file in files)]


def table(results: Sequence[Result]) -> list[str]:
    """Return the lines of the table: a kind of fault each."""
    rows = [("fault", "count", "noticed p50", "p95", "next step p50", "p95")]
    for kind, words in KINDS.items():
        of_kind = [result for result in results if result.kind == kind]
        if not of_kind:
            continue
        noticed = percentiles([result.noticed for result in of_kind])
        trained = [result.next_step for result in of_kind if result.next_step is not None]
        later = percentiles(trained) if trained else None
        shown = [f"{seconds:.1f} s" for seconds in (*noticed, *(later or ()))]
        rows.append((words, str(len(of_kind)), *shown, *(("-", "-") if later is None else ())))
    return table_lines(rows, right=range(1, 6), indent=0)


def main(arguments: Sequence[str]) -> int:
    """Run a storm; return 0, or 1 if the run did not end as the one without faults."""
    parser = argparse.ArgumentParser("scripts/faults --storm", description=__doc__)
    parser.add_argument("--faults", type=int, default=50, help="most faults (50)")
    parser.add_argument("--minutes", type=float, default=20, help="no fault strikes later (20)")
    parser.add_argument("--seed", type=int, default=1, help="of kinds, ranks and moments (1)")
    parser.add_argument("--out", type=Path, help="a new folder for both runs, kept afterwards")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="fault_storm_")) if given.out is None else given.out.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    if any(folder.iterdir()):
        parser.error(f"{folder} is not empty: name a new folder")
    load = os.getloadavg()[0]
    problems = run_storm(folder, given.faults, given.seed, given.minutes)
    print(f"load average {load:.1f} before, {os.getloadavg()[0]:.1f} after")
    if problems:
        print("\n".join(["DIFFERS:", *problems, f"see {folder}"]))
    else:
        print("metrics, weights and moments are those of the run without faults, bit for bit; nothing is left")
        if given.out is None:
            shutil.rmtree(folder)
    return int(bool(problems))
