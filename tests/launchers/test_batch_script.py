"""The batch script of a job: its options, its quoting, and what its shell does at a warning."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
from launching import wait_until

from megalaunch.launchers.launcher import Job, LauncherError
from megalaunch.launchers.slurm.batch_script import batch_script
from megalaunch.rundir.jsonl import read_lines
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.slurm import SlurmSpec

OUTPUT = Path("/runs/a/logs/slurm-%j.out")


def job_of(
    devices: int = 8,
    arguments: tuple[str, ...] = ("train", "recipe=tiny"),
    directory: Path = Path("/runs/a"),
    max_restarts: int = 3,
    **slurm: object,
) -> Job:
    settings = LauncherSpec(
        name="slurm", python="/opt/python", max_restarts=max_restarts, restart_backoff=0.25, slurm=SlurmSpec(**slurm)
    )
    return Job("llama", 2, devices, arguments, directory, Path("/home/me"), settings)


def options_of(job: Job) -> list[str]:
    """The options as sbatch reads them."""
    lines = batch_script(job, OUTPUT).splitlines()
    return [word for line in lines if line.startswith("#SBATCH ") for word in shlex.split(line)[1:]]


def test_the_whole_script_without_restarts():
    more = {"account": "lab", "partition": "gpu", "time": "4:00:00", "extra": ("--mail-type=END",)}
    job = job_of(cpus_per_task=32, max_restarts=0, **more)
    assert batch_script(job, OUTPUT) == (
        "#!/bin/bash\n"
        "#SBATCH --job-name=llama\n"
        "#SBATCH --account=lab\n"
        "#SBATCH --partition=gpu\n"
        "#SBATCH --time=4:00:00\n"
        "#SBATCH --nodes=2\n"
        "#SBATCH --ntasks-per-node=1\n"
        "#SBATCH --gpus-per-node=8\n"
        "#SBATCH --cpus-per-task=32\n"
        "#SBATCH --signal=B:USR1@120\n"
        "#SBATCH --chdir=/home/me\n"
        "#SBATCH --output=/runs/a/logs/slurm-%j.out\n"
        "#SBATCH --open-mode=append\n"
        "#SBATCH --exclusive\n"
        "#SBATCH --requeue\n"
        "#SBATCH --mail-type=END\n"
        "\n"
        "warned=0\n"
        'trap \'trap "" USR1; warned=1; kill -USR1 "$srun" 2>/dev/null\' USR1  '
        "# the time limit is near: the workers save\n"
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --cpus-per-task=32 "
        "/opt/python -m megalaunch train recipe=tiny &\n"
        "srun=$!\n"
        'wait "$srun"; code=$?\n'
        'if [ "$warned" = 1 ]; then  # the trap ended the wait; 127: srun had ended before\n'
        '    wait "$srun"; ended=$?; [ "$ended" -eq 127 ] || code=$ended\n'
        "fi\n"
        'if [ "$warned" = 1 ] && [ "$code" -ne 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ]; then\n'
        '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script meanwhile\n'
        "fi\n"
        'exit "$code"\n'
    )


@pytest.mark.parametrize(
    ("slurm", "present", "absent"),
    [
        ({"gres": "gpu:h100:8"}, ["--gres=gpu:h100:8"], "--gpus-per-node"),
        ({"gres": "none"}, [], "--g"),
        ({"mem": "0", "qos": "high", "constraint": "a&b"}, ["--mem=0", "--qos=high", "--constraint=a&b"], "--time"),
        ({"requeue": False}, ["--no-requeue", "--signal=USR1@120"], "--requeue"),
        ({"signal": None}, ["--requeue"], "--signal"),
        ({"exclusive": False, "nodelist": "n[1-2]"}, ["--nodelist=n[1-2]"], "--exclusive"),
        ({"reservation": "r", "dependency": "afterok:7", "exclude": "n9"}, ["--dependency=afterok:7"], "--no-requeue"),
    ],
)
def test_options(slurm, present, absent):
    options = options_of(job_of(**slurm))
    assert set(present) <= set(options)
    assert not [option for option in options if option.startswith(absent)]


def test_a_run_on_cpus_asks_for_no_gpus():
    assert not [option for option in options_of(job_of(devices=0)) if "gpu" in option]


def test_a_container_is_given_to_srun():
    slurm = {"container_image": "me/image:1", "container_mounts": ("/data:/data", "/a b:/c"), "container_workdir": "/w"}
    job = job_of(**slurm)
    srun = next(line for line in batch_script(job, OUTPUT).splitlines() if line.strip().startswith("srun --"))
    words = shlex.split(srun)
    assert words[7:10] == [
        "--container-image=me/image:1", "--container-mounts=/data:/data,/a b:/c", "--container-workdir=/w"
    ]  # fmt: skip
    anywhere = replace(job, settings=replace(job.settings, python=None))
    assert " python3 -m megalaunch " in batch_script(anywhere, OUTPUT)


TRICKY = ("a b", "it's", '"', "$(touch x)", "`id`", "; touch y #", "*", "~", "ä%j", "\\", "--x", "")


@pytest.mark.parametrize("value", TRICKY)
def test_values_reach_sbatch_and_the_command_as_they_are(value, tmp_path):
    job = job_of(arguments=("train", f"run.name={value}"), constraint=value, requeue=False)
    assert f"--constraint={value}" in options_of(job)
    echo = tmp_path / "srun"
    echo.write_text(f"#!{sys.executable}\nimport sys\nprint(repr(sys.argv[-1]))\n")
    echo.chmod(0o755)
    script = tmp_path / "job.sbatch"
    script.write_text(batch_script(job, OUTPUT))
    done = subprocess.run(
        ["bash", script], env={"PATH": f"{tmp_path}:/bin"}, cwd=tmp_path, capture_output=True, text=True
    )
    assert done.stdout == f"{f'run.name={value}'!r}\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["job.sbatch", "srun"]


def test_the_name_of_the_output_file_is_no_pattern():
    text = batch_script(job_of(), Path("/runs/100%j/logs/slurm-%j.out"))
    assert "--output=/runs/100%%j/logs/slurm-%j.out\n" in text


def test_a_line_break_is_refused():
    with pytest.raises(LauncherError, match=r"'a\\n#SBATCH --x' has a control character"):
        batch_script(job_of(account="a\n#SBATCH --x"), OUTPUT)


def programs(folder: Path, **texts: str) -> None:
    """Shell scripts that stand in for Slurm's commands."""
    for name, text in texts.items():
        (folder / name).write_text(f"#!/bin/bash\n{text}\n")
        (folder / name).chmod(0o755)


@pytest.mark.parametrize(
    ("warned", "code", "restarts", "requeued"),
    [(True, 75, 0, True), (True, 5, 0, True), (True, 0, 0, False), (True, 75, 100, False), (False, 75, 0, False)],
)
def test_the_job_is_queued_again_after_a_warning(warned, code, restarts, requeued, tmp_path):
    """A stand-in for srun ends with `code`, at once or at the warning; `scontrol` notes that it was called."""
    end = "while :; do /bin/sleep 0.1; done" if warned else f"exit {code}"
    programs(tmp_path, srun=f"trap 'exit {code}' USR1\ntouch started\n{end}", scontrol='echo "$@" > requeued')
    script = tmp_path / "job.sbatch"
    script.write_text(batch_script(job_of(), OUTPUT).replace("sleep 60", "sleep 0"))
    environment = {"PATH": f"{tmp_path}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": str(restarts)}
    process = subprocess.Popen(["bash", script], env=environment, cwd=tmp_path, start_new_session=True)
    try:
        wait_until((tmp_path / "started").exists)
        if warned:
            process.send_signal(signal.SIGUSR1)
        assert process.wait(20) == code
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 12\n"


def ran(folder: Path, codes: str, nodes: str = "echo allocated", **options: object) -> tuple[int, list[str]]:
    """The exit code of a job whose srun ends with these codes in turn, `+` after a checkpoint; the calls by attempt."""
    directory = folder / "it's 100% \"$HOME"
    (directory / "checkpoints/step_00000020").mkdir(parents=True)
    (folder / "codes").write_text(codes.replace(" ", "\n") + "\n")
    srun = (
        'echo "srun $MEGALAUNCH_ATTEMPT" >> calls; read -r code < codes; sed -i 1d codes; cd */\n'
        '[ ! -e outcome.json ] || echo "an old outcome" >> ../calls; touch outcome.json\n'
        '[ "$code" = "${code%+}" ] || mkdir checkpoints/step_000000$((30 + MEGALAUNCH_ATTEMPT))\nexit "${code%+}"'
    )
    programs(folder, srun=srun, scontrol='echo "$@" >> calls; exit 0', sinfo=nodes, sleep='echo "sleep $1" >> calls')
    script = folder / "job.sbatch"
    script.write_text(batch_script(job_of(directory=directory, **options), OUTPUT))
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(["bash", script], env=environment, cwd=folder, capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_srun_runs_again_after_a_failure_and_its_restarts_are_recorded(tmp_path):
    code, calls = ran(tmp_path, "5 6 0")
    assert (code, calls) == (0, ["srun 0", "sleep 0", "srun 1", "sleep 0.25", "srun 2"])
    (folder,) = (path for path in tmp_path.iterdir() if path.is_dir())
    events = list(read_lines(folder / "events.jsonl"))
    assert [event.pop("time") for event in events] == pytest.approx([time.time()] * 2, abs=60)
    reasons = ["srun ended with exit code 5", "srun ended with exit code 6"]
    assert events == [
        {"event": "restart", "attempt": 1, "reason": reasons[0], "pause_seconds": 0},
        {"event": "restart", "attempt": 2, "reason": reasons[1], "pause_seconds": 0.25},
    ]


def test_the_restarts_in_a_row_are_those_of_the_spec_and_a_new_checkpoint_resets_their_count(tmp_path):
    code, calls = ran(tmp_path, "5 137 5+ 5 5 0", max_restarts=2)
    assert (code, [call for call in calls if call.startswith("srun")]) == (5, [f"srun {n}" for n in range(5)])
    assert [call for call in calls if call.startswith("sleep")] == ["sleep 0", "sleep 0.25", "sleep 0", "sleep 0.25"]


@pytest.mark.parametrize("code", [0, 2, 3, 4, 7, 8, 75, 130])
def test_an_end_that_no_restart_cures_ends_the_job(tmp_path, code):
    assert ran(tmp_path, str(code)) == (code, ["srun 0"])


@pytest.mark.parametrize("state", ["allocated*", "down", "failing"])
def test_the_job_is_queued_again_without_a_node_that_is_down(tmp_path, state):
    code, calls = ran(tmp_path, "1 0", nodes=f"echo 'allocated\n{state}'")
    assert calls[:3] == ["srun 0", "requeue 12", "sleep 60"]
    assert code == 0


def test_srun_runs_again_beside_a_node_that_is_down_where_a_job_is_not_queued_again(tmp_path):
    assert ran(tmp_path, "1 0", nodes="echo down", requeue=False) == (0, ["srun 0", "sleep 0", "srun 1"])
