"""The batch script of a job that chooses its nodes, with commands of Slurm that are played: lost, spare, back."""

from __future__ import annotations

import json
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from megalaunch.launchers.launcher import Job
from megalaunch.launchers.slurm.batch_script import batch_script
from megalaunch.rundir.jsonl import read_lines
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.slurm import SlurmSpec

# A line of `turns` is the exit code of a start, the nodes that are lost in it, and what else it does.
_SRUN = r"""
for word in "$@"; do case "$word" in --nodelist=*) list="${word#*=}" ;; --exclude=*) exit 0 ;; esac; done
case "$*" in *'$SLURM_NODEID $SLURMD_NODENAME'*)
    cat > /dev/null  # as the real one, which passes its stdin on
    rank=0
    for node in ${list//,/ }; do grep -qx "$node" lost || echo "$rank $node"; rank=$((rank + 1)); done
    exit ;;
esac
echo "train $list ${!#}" >> calls
read -r code gone action < turns; sed -i 1d turns
[ "$gone" = - ] || echo "$gone" >> lost
eval "$action"
exit "$code"
"""
_STANDINS = {
    "srun": _SRUN,
    "squeue": "echo 'n[1-3]'",
    "sinfo": "cat nodes",
    "scontrol": 'if [ "$1" = show ]; then cut -d " " -f 1 nodes; else echo "$@" >> calls; fi',
    "scancel": 'echo "scancel $@" >> calls',
    "sleep": "exec /bin/sleep 0.05",
}
ALONE = {1: ("train", "alone")}


def job_of(folder: Path, nodes: int = 2, fewer: dict[int, tuple[str, ...]] = ALONE, **slurm: object) -> Job:
    settings = LauncherSpec(name="slurm", python="python", restart_backoff=0.1, slurm=SlurmSpec(**slurm))
    return Job("llama", nodes, 0, ("train", "all"), folder / "run", folder, settings, fewer=fewer)


def script_of(job: Job) -> str:
    return batch_script(job, job.directory / "logs/slurm-%j.out")


def ran(job: Job, *turns: str, nodes: str = "n1 n2") -> tuple[int, list[str]]:
    """The exit code of the job on these nodes, and its calls: starts of launchers, and what it asks of Slurm."""
    folder = job.working_directory
    for path in ("logs", "checkpoints"):
        (job.directory / path).mkdir(parents=True)
    for name, text in _STANDINS.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)
    states = [name if " " in name else f"{name} allocated" for name in nodes.split(", " if "," in nodes else " ")]
    (folder / "nodes").write_text("\n".join(states) + "\n")
    (folder / "turns").write_text("\n".join(turns) + "\n")
    for name in ("lost", "calls"):
        (folder / name).touch()
    (folder / "job.sbatch").write_text(script_of(job))
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-3]"}
    environment |= {"SLURM_JOB_NUM_NODES": str(len(states)), "SLURMD_NODENAME": "n1"}
    done = subprocess.run(
        ["bash", "job.sbatch"],
        env=environment,
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.stderr == ""
    return done.returncode, (folder / "calls").read_text().splitlines()


def told(job: Job) -> list[tuple[object, ...]]:
    """What the events say of nodes and restarts."""
    events = list(read_lines(job.directory / "events.jsonl"))
    keys = ("nodes", "wanted", "hosts", "reason", "message")
    return [(event["event"], *(event[key] for key in keys if key in event)) for event in events]


def test_a_job_that_chooses_its_nodes_keeps_them_when_one_is_lost_and_asks_for_spare_ones(tmp_path):
    job = job_of(tmp_path, fewer={}, spare_nodes=2)
    options = script_of(job).splitlines()
    assert {"#SBATCH --nodes=4", "#SBATCH --no-kill", "#SBATCH --requeue"} <= set(options)
    on_all = replace(job, settings=replace(job.settings, slurm=SlurmSpec()))
    assert "--no-kill" not in script_of(on_all)
    trial = script_of(replace(job, nodes=1))  # of a sweep, with the settings of a run
    assert "--nodes=1\n" in trial
    assert "--no-kill" not in trial


def test_the_run_continues_without_a_lost_node_by_the_command_for_fewer(tmp_path):
    job = job_of(tmp_path)
    assert ran(job, "5 n2", "0 -") == (0, ["train n1,n2 all", "train n1 alone"])
    why = "n2 does not answer"
    assert told(job) == [("restart", "srun ended with exit code 5"), ("nodes_changed", 1, 2, ["n1"], why)]


def test_spare_nodes_take_the_places_of_lost_ones_until_too_few_are_left(tmp_path):
    job = job_of(tmp_path, fewer={}, spare_nodes=1)
    code, calls = ran(job, "5 n2", "5 n1", "0 -", nodes="n1 n2 n3")
    assert calls[:3] == ["train n1,n2 all", "train n1,n3 all", "requeue 12"]
    assert told(job)[1] == ("note", "the run continues on n1,n3: n2 does not answer")
    assert code == 5


@pytest.mark.parametrize("state", ["allocated*", "down*", "failing", "draining", "drained"])
def test_a_node_that_slurm_does_not_use_is_not_asked(tmp_path, state):
    job = job_of(tmp_path)
    assert ran(job, "0 -", nodes=f"n1 {state}, n2 mixed") == (0, ["train n2 alone"])


def test_a_node_in_two_partitions_is_asked_once(tmp_path):
    assert ran(job_of(tmp_path), "0 -", nodes="n1 n2 n1")[1] == ["train n1,n2 all"]


@pytest.mark.parametrize("spare", [0, 1])
def test_a_node_that_failed_the_preflight_is_left_out_where_the_run_can_start_without_it(tmp_path, spare):
    outcome = json.dumps({"exit_code": 2, "details": {"failed_nodes": [1]}}, indent=2).replace("\n", " ")
    job = job_of(tmp_path, fewer={}, spare_nodes=spare)
    code, calls = ran(job, f"2 - echo '{outcome}' > run/outcome.json", "0 -", nodes="n1 n2 n3" if spare else "n1 n2")
    assert (code, calls[1:]) == ((0, ["train n1,n3 all"]) if spare else (2, []))
    if spare:
        assert told(job)[1] == ("note", "the run continues on n1,n3: n2 failed the preflight")


def test_any_other_refusal_ends_the_job(tmp_path):
    assert ran(job_of(tmp_path), "2 - echo '{}' > run/outcome.json") == (2, ["train n1,n2 all"])


def test_a_launcher_alone_restarts_its_own_workers(tmp_path):
    assert ran(job_of(tmp_path), "5 n2", "5 -") == (5, ["train n1,n2 all", "train n1 alone"])


SAVING = "mkdir -p run/checkpoints/step_00000010"
UNTIL_TOLD = "trap 'mkdir run/checkpoints/step_00000011; exit 75' USR1; while :; do /bin/sleep 0.05; done"


def test_after_a_checkpoint_the_run_saves_and_takes_back_a_node_that_answers(tmp_path):
    job = job_of(tmp_path)
    back = f": > lost; /bin/sleep 0.5; {SAVING}; {UNTIL_TOLD}"
    code, calls = ran(job, "5 n2", f"0 - {back}", "0 -")
    assert (code, calls) == (0, ["train n1,n2 all", "train n1 alone", "train n1,n2 all"])
    assert told(job)[2:] == [("restart", "lost nodes are back"), ("nodes_changed", 2, 2, ["n1", "n2"], "n2 is back")]


def test_without_questions_a_node_stays_out_until_a_restart(tmp_path):
    job = job_of(tmp_path)
    job = replace(job, settings=replace(job.settings, rejoin_every=0))
    _, calls = ran(job, "5 n2", f"137 - : > lost; {SAVING}; /bin/sleep 1", "0 -")
    assert calls == ["train n1,n2 all", "train n1 alone", "train n1,n2 all"]


SLOW_DEVICE = {"event": "straggler", "step": 60, "cause": "compute", "ranks": [1], "nodes": [1], "median_times": {}}
WAITS_FOR_CPU = {**SLOW_DEVICE, "cause": "cpu"}
WAITS_FOR_DATA = {**SLOW_DEVICE, "cause": "data"}
SLOW_LINKS = {"event": "network", "nodes": 2, "slow_nodes": [1]}
COMPUTED, LINKS = "computed slower than the others", "had slower links than the others"


def naming(*named: dict, until: str = UNTIL_TOLD) -> str:
    """A start of launchers in which events name slow nodes, in the form of this engine's events."""
    lines = " ".join(f"'{json.dumps({'time': 1.0, **event})}'" for event in named)
    return f"0 - printf '%s\\n' {lines} >> run/events.jsonl; {until}"


@pytest.mark.parametrize(
    ("event", "how"), [(SLOW_DEVICE, COMPUTED), (WAITS_FOR_CPU, COMPUTED), (SLOW_LINKS, LINKS)], ids=str
)
def test_a_spare_node_takes_the_place_of_a_slow_one(tmp_path, event, how):
    job = job_of(tmp_path, fewer={}, spare_nodes=1, replace_stragglers=True)
    assert ran(job, naming(event), "0 -", nodes="n1 n2 n3") == (0, ["train n1,n2 all", "train n1,n3 all"])
    assert told(job)[1:] == [
        ("restart", f"node 1 (n2) {how}"),
        ("note", f"the run continues on n1,n3: n2 {how}"),
    ]


def test_several_slow_nodes_are_replaced_together_and_their_checkpoint_counts_as_progress(tmp_path):
    job = job_of(tmp_path, fewer={}, spare_nodes=3, replace_stragglers=True)
    job = replace(job, settings=replace(job.settings, max_restarts=1))
    both = naming({**SLOW_DEVICE, "nodes": [0, 1]})
    third = naming(SLOW_DEVICE, until=UNTIL_TOLD.replace("11", "12"))
    code, calls = ran(job, both, third, "0 -", nodes="n1 n2 n3 n4 n5")
    assert (code, calls) == (0, ["train n1,n2 all", "train n3,n4 all", "train n3,n5 all"])
    reasons = [event[1] for event in told(job) if event[0] == "restart"]
    assert reasons == [f"node 0 (n1) and node 1 (n2) {COMPUTED}", f"node 1 (n4) {COMPUTED}"]


@pytest.mark.parametrize(
    ("event", "settings", "lost"),
    [
        (WAITS_FOR_DATA, {}, "-"),
        (SLOW_DEVICE, {"replace_stragglers": False}, "-"),
        (SLOW_DEVICE, {}, "n3"),  # the spare node
        ({**SLOW_DEVICE, "nodes": [0, 1]}, {}, "-"),
        ({**SLOW_LINKS, "slow_nodes": []}, {}, "-"),
    ],
    ids=str,
)
def test_a_slow_node_stays_where_none_can_take_its_place_or_the_cause_is_no_node(tmp_path, event, settings, lost):
    job = job_of(tmp_path, fewer={}, **{"spare_nodes": 1, "replace_stragglers": True, **settings})
    told_to_save = "trap 'exit 75' USR1; for turn in {1..20}; do /bin/sleep 0.05; done"
    turn = naming(event, until=told_to_save).replace("0 -", f"0 {lost}", 1)
    assert ran(job, turn, "0 -", nodes="n1 n2 n3") == (0, ["train n1,n2 all"])


def test_an_event_whose_nodes_cannot_all_be_replaced_does_not_hide_the_next(tmp_path):
    job = job_of(tmp_path, fewer={}, spare_nodes=1, replace_stragglers=True)
    turn = naming({**SLOW_DEVICE, "nodes": [0, 1]}, SLOW_LINKS)
    assert ran(job, turn, "0 -", nodes="n1 n2 n3")[1] == ["train n1,n2 all", "train n1,n3 all"]
    assert told(job)[2] == ("restart", f"node 1 (n2) {LINKS}")


def test_a_slow_node_whose_run_could_not_save_may_take_part_again(tmp_path):
    job = job_of(tmp_path, fewer={}, spare_nodes=1, replace_stragglers=True)
    turn = naming(SLOW_DEVICE, until="trap 'exit 5' USR1; while :; do /bin/sleep 0.05; done")
    assert ran(job, turn, "0 -", nodes="n1 n2 n3") == (0, ["train n1,n2 all"] * 2)
    assert not RunDirectory(job.directory).slow_nodes.exists()


def test_slow_nodes_of_an_earlier_attempt_are_not_named_again(tmp_path):
    job = job_of(tmp_path, fewer={}, spare_nodes=2, replace_stragglers=True)
    failing = naming(SLOW_DEVICE, until="exit 5")  # before the script has looked
    assert ran(job, failing, "0 - /bin/sleep 1", nodes="n1 n2 n3 n4") == (0, ["train n1,n2 all"] * 2)


@pytest.mark.parametrize(
    ("requeue", "restarts", "left", "asked"),
    [
        (True, 0, "n2", "requeue 12"),
        (True, 100, "n2", "scancel 12"),
        (False, 0, "n2", "scancel 12"),
        (True, 0, "n1 n2", ""),
    ],
)
def test_the_other_nodes_queue_a_job_again_whose_script_is_lost_with_its_node(tmp_path, requeue, restarts, left, asked):
    text = script_of(job_of(tmp_path, requeue=requeue))
    guard = text[text.index("guard() {") :].partition("\n}\n")[0]
    names = "\\n".join(left.split())
    programs = {
        "srun": 'while [ "$1" != sh ]; do shift; done; exec "$@"',
        "squeue": "echo nodes",
        "scontrol": f'if [ "$1" = show ]; then printf "{names}\\n"; else echo "$@" >> calls; fi',
        "scancel": 'echo "scancel $@" >> calls',
        "sleep": 'echo >> naps; [ "$(wc -l < naps)" -lt 4 ] && [ "$1" != 600 ] || kill $PPID',
    }
    for name, program in programs.items():
        (tmp_path / name).write_text(f"#!/bin/bash\n{program}\n")
        (tmp_path / name).chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURMD_NODENAME": "n1"}
    environment |= {"SLURM_NODEID": "0", "SLURM_STEP_NUM_NODES": "1", "SLURM_JOB_NUM_NODES": "2"}
    environment |= {"SLURM_RESTART_COUNT": str(restarts)}
    subprocess.run(["bash", "-c", f"{guard}\n}}; guard; wait"], env=environment, cwd=tmp_path, timeout=20)
    calls = tmp_path / "calls"
    assert (calls.read_text().strip() if calls.exists() else "") == asked
