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
from megalaunch.rundir.outcome import STOPPED_BETWEEN_ATTEMPTS, Outcome, read_outcome
from megalaunch.schema.launcher import LauncherSpec
from megalaunch.schema.slurm import SlurmSpec

OUTPUT = Path("/runs/a/logs/slurm-%j.out")


def job_of(
    devices: int = 8,
    arguments: tuple[str, ...] = ("train", "recipe=tiny"),
    directory: Path = Path("/runs/a"),
    max_restarts: int = 3,
    backoff: float = 0.25,
    **slurm: object,
) -> Job:
    settings = LauncherSpec(
        name="slurm",
        python="/opt/python",
        max_restarts=max_restarts,
        restart_backoff=backoff,
        slurm=SlurmSpec(**slurm),
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
        "warned=0; stopped=0; child=\n"
        "pass_on() {  # not to a copy of this shell, which would lose it before it becomes the program\n"
        '    sleep 1; kill -USR1 "$child" 2>/dev/null\n'
        "}\n"
        "trap 'heard=1; [ \"$warned$stopped\" != 00 ] || { warned=1; pass_on; }; warned=1' USR1  "
        "# the time limit is near: the workers save\n"
        "trap 'heard=1; stopped=1; [ \"$warned\" != 0 ] || pass_on' USR2  # megalaunch stop\n"
        "await() {  # the exit code of process $1, to `ended`\n"
        "    local status; child=$1; ended=127; heard=1\n"
        '    [ "$warned$stopped" = 00 ] || pass_on\n'
        '    while [ "$heard" = 1 ]; do  # a trap ends a wait\n'
        '        heard=0; wait "$child" 2>/dev/null; status=$?\n'
        '        [ "$status" -eq 127 ] || ended=$status  # 127: it had ended before\n'
        "    done\n"
        "}\n"
        "requeue() {  # $1: the reason\n"
        '    echo "job $SLURM_JOB_ID is queued again: $1"\n'
        '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script meanwhile\n'
        "}\n"
        "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpu-bind=none --kill-on-bad-exit=1 --cpus-per-task=32 "
        "/opt/python -m megalaunch train recipe=tiny &\n"
        'await "$!"; code=$ended\n'
        'case "$code" in 0 | 2 | 3 | 4 | 7 | 8 | 130) exit "$code" ;; esac\n'
        '[ "$warned" = 1 ] && [ "$stopped" = 0 ] && [ "${SLURM_RESTART_COUNT:-0}" -lt 100 ] '
        '&& requeue "its time limit is near"\n'
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


HELD_BACK = "0.3"
"""Seconds for which the tested script holds a signal back, in place of one: what gets it is a shell that listens."""
ENDLESS = "while :; do /bin/sleep 0.05; done"


def ran_with_signals(folder: Path, *sent: tuple[str, int], restarts: int = 0, **options: object) -> tuple[int, str]:
    """The exit code and output of a job to which a signal is sent as soon as a file of its folder is there."""
    (folder / "run/checkpoints").mkdir(parents=True)
    script = folder / "job.sbatch"
    text = batch_script(job_of(directory=folder / "run", **options), OUTPUT)
    assert "sleep 1;" in text
    script.write_text(text.replace("sleep 60", ":").replace("sleep 1;", f"sleep {HELD_BACK};"))
    (folder / "run/logs").mkdir()
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_RESTART_COUNT": str(restarts)}
    piped = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    process = subprocess.Popen(["bash", script], env=environment, cwd=folder, start_new_session=True, **piped)
    try:
        for name, number in sent:
            wait_until((folder / name).exists)
            process.send_signal(number)
        output, _ = process.communicate(timeout=20)
        return process.returncode, output
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.parametrize("max_restarts", [0, 3])
@pytest.mark.parametrize(
    ("code", "restarts", "requeued"),
    [(75, 0, True), (5, 0, True), (137, 0, True), (75, 100, False), *((code, 0, False) for code in (0, 2, 3, 4, 7, 8))],
)
def test_the_job_is_queued_again_after_a_warning(max_restarts, code, restarts, requeued, tmp_path):
    """A stand-in for srun ends with `code` at the warning; `scontrol` notes that it was called."""
    programs(tmp_path, srun=f"trap 'exit {code}' USR1\ntouch started\n{ENDLESS}", scontrol='echo "$@" > requeued')
    warning = ("started", signal.SIGUSR1)
    ended, output = ran_with_signals(tmp_path, warning, restarts=restarts, max_restarts=max_restarts)
    assert ended == code
    assert output == ("job 12 is queued again: its time limit is near\n" if requeued else "")
    assert (tmp_path / "requeued").exists() == requeued
    if requeued:
        assert (tmp_path / "requeued").read_text() == "requeue 12\n"


def test_a_save_without_a_warning_ends_the_job(tmp_path):
    programs(tmp_path, srun="exit 75", scontrol="touch requeued")
    assert ran_with_signals(tmp_path, max_restarts=0) == (75, "")
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("max_restarts", [0, 3])
@pytest.mark.parametrize("code", [75, 138])  # 128 + SIGUSR1: Python had not started
def test_a_stop_reaches_the_launchers_once_and_ends_the_job(max_restarts, code, tmp_path):
    """A warning during the save would be a second signal, after which they end without a checkpoint.

    The save takes longer than the time for which the script holds a signal back.
    """
    save = "trap 'echo >> saves; touch saving' USR1; touch started; until [ -e saving ]; do /bin/sleep 0.05; done"
    programs(tmp_path, srun=f"echo >> starts; {save}; /bin/sleep 1; exit {code}", scontrol="touch requeued")
    signals = (("started", signal.SIGUSR2), ("saving", signal.SIGUSR1))
    ended = 75 if max_restarts else code  # a script that restarts knows that nothing but the stop ended the job
    assert ran_with_signals(tmp_path, *signals, max_restarts=max_restarts) == (ended, "")
    assert ((tmp_path / "starts").read_text(), (tmp_path / "saves").read_text()) == ("\n", "\n")
    assert not (tmp_path / "requeued").exists()


def test_a_stop_after_a_warning_lets_the_save_finish_and_the_job_is_not_queued_again(tmp_path):
    save = "trap 'echo >> saves; touch saving' USR1; touch started; until [ -e saving ]; do /bin/sleep 0.05; done"
    programs(tmp_path, srun=f"{save}; /bin/sleep 1; exit 75", scontrol="touch requeued")
    assert ran_with_signals(tmp_path, ("started", signal.SIGUSR1), ("saving", signal.SIGUSR2)) == (75, "")
    assert (tmp_path / "saves").read_text() == "\n"
    assert not (tmp_path / "requeued").exists()


@pytest.mark.parametrize("moment", ["sinfo", "pause"])
@pytest.mark.parametrize("number", [signal.SIGUSR2, signal.SIGUSR1])
def test_a_signal_between_two_starts_of_srun_prevents_the_next(moment, number, tmp_path):
    """It comes while sinfo runs, or in the pause: a stop ends the job, with its own code; a warning queues it again."""
    asked = "touch asked; /bin/sleep 0.5; echo allocated" if moment == "sinfo" else "echo allocated"
    pause = f'[ "$1" = {HELD_BACK} ] || {{ {"touch asked" if moment == "pause" else ":"}; exec /bin/sleep 60; }}'
    srun = "echo >> starts; mkdir run/checkpoints/step_00000080; touch run/outcome.json; exit 5"
    programs(tmp_path, srun=srun, sinfo=asked, sleep=pause)
    programs(tmp_path, scontrol="touch requeued")
    code, output = ran_with_signals(tmp_path, ("asked", number))
    is_warning = number == signal.SIGUSR1
    assert output == ("job 12 is queued again: its time limit is near\n" if is_warning else "")
    assert (tmp_path / "starts").read_text() == "\n"
    outcome, events = read_outcome(tmp_path / "run/outcome.json"), tmp_path / "run/events.jsonl"
    if is_warning:
        assert (code, outcome, events.exists()) == (5, None, False)  # the outcome of the attempt that failed
    else:
        assert (code, outcome) == (75, Outcome(75, STOPPED_BETWEEN_ATTEMPTS, 80))
        (end,) = read_lines(events)
        assert end.pop("time") == pytest.approx(time.time(), abs=60)
        assert end == {"event": "outcome", "exit_code": 75, "reason": STOPPED_BETWEEN_ATTEMPTS}
    assert (tmp_path / "requeued").exists() == is_warning


def test_a_stop_while_sinfo_runs_prevents_a_requeue(tmp_path):
    programs(tmp_path, srun="exit 5", sinfo="touch asked; /bin/sleep 0.5; echo down", scontrol="touch requeued")
    assert ran_with_signals(tmp_path, ("asked", signal.SIGUSR2)) == (75, "")
    assert not (tmp_path / "requeued").exists()


def test_a_stop_before_a_start_of_srun_prevents_it(tmp_path):
    programs(tmp_path, srun="echo >> starts; exit 5", sinfo="", date="touch asked; /bin/sleep 0.5; echo 1.5")
    assert ran_with_signals(tmp_path, ("asked", signal.SIGUSR2))[0] == 75
    assert (tmp_path / "starts").read_text() == "\n"


@pytest.mark.parametrize("came", ["stopped", "warned"])
def test_a_signal_from_just_before_srun_started_reaches_it(came, tmp_path):
    functions, _, _ = batch_script(job_of(), OUTPUT).partition("requeue() {")
    script = f'{functions}{came}=1; sleep 60 & await "$!"; echo "$ended"'
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=20)
    assert (done.stdout, done.stderr) == (f"{128 + signal.SIGUSR1}\n", "")


def directory_of(folder: Path) -> Path:
    return folder / "it's 100% \"$HOME"


def ran(folder: Path, codes: str, nodes: str = "echo allocated", **options: object) -> tuple[int, list[str]]:
    """The exit code of a job and the calls by attempt.

    Its srun ends with these codes in turn, `+` after a checkpoint; `3:5`: a launcher ends with 3, and srun with 5.
    """
    directory = directory_of(folder)
    (directory / "checkpoints/step_00000020").mkdir(parents=True)
    (directory / "logs").mkdir()
    (folder / "codes").write_text(codes.replace(" ", "\n") + "\n")
    srun = (
        'while [ "${1#--}" != "$1" ]; do shift; done; [ "$1" != sh ] || { echo look >> calls; exec "$@"; }\n'
        'echo "srun $MEGALAUNCH_ATTEMPT" >> calls; read -r code < codes; sed -i 1d codes; cd */\n'
        '[ ! -e outcome.json ] || echo "an old outcome" >> ../calls; touch outcome.json\n'
        '[ "$code" = "${code#*:}" ] || echo "${code%:*}" > "$MEGALAUNCH_FINAL_CODE"; code="${code#*:}"\n'
        '[ "$code" = "${code%+}" ] || mkdir checkpoints/step_000000$((30 + MEGALAUNCH_ATTEMPT))\nexit "${code%+}"'
    )
    programs(folder, srun=srun, scontrol='echo "$@" >> calls; exit 0', sinfo=nodes, sleep='echo "sleep $1" >> calls')
    script = folder / "job.sbatch"
    script.write_text(batch_script(job_of(directory=directory, **options), OUTPUT))
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_ID": "12", "SLURM_JOB_NODELIST": "n[1-2]"}
    done = subprocess.run(["bash", script], env=environment, cwd=folder, capture_output=True, text=True, timeout=30)
    assert done.stderr == ""
    assert not (directory / "logs/final_code").exists()
    return done.returncode, (folder / "calls").read_text().splitlines()


def test_srun_runs_again_after_a_failure_and_its_restarts_are_recorded(tmp_path):
    code, calls = ran(tmp_path, "5 6 0")
    assert (code, calls) == (0, ["srun 0", "sleep 0", "srun 1", "sleep 0.25", "srun 2"])
    events = list(read_lines(directory_of(tmp_path) / "events.jsonl"))
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


@pytest.mark.parametrize("code", [0, 2, 3, 4, 7, 8, 75, 130, 143])  # 143: SIGTERM, before Python had started
def test_an_end_that_no_restart_cures_ends_the_job(tmp_path, code):
    assert ran(tmp_path, str(code)) == (code, ["srun 0"])


@pytest.mark.parametrize(
    ("codes", "code"),
    [("3:5", 3), ("2:137", 2), ("75:137", 75), ("5 2:137", 2)],
    ids=["node 0 among nodes that end with it", "srun kills the others", "a long save", "of the second attempt"],
)
def test_a_final_code_of_one_launcher_ends_the_job(codes, code, tmp_path):
    ended, calls = ran(tmp_path, codes)
    assert (ended, [call for call in calls if call.startswith("srun")][1:]) == (code, ["srun 1"] * codes.count(" "))


@pytest.mark.parametrize(("shared", "code", "more"), [(True, 0, ["sleep 0", "srun 1"]), (False, 2, [])])
def test_a_node_that_does_not_see_the_run_directory_ends_the_job(shared, code, more, tmp_path):
    """Its launcher cannot leave its code where the script would find it, and srun kills the others."""
    if shared:
        directory_of(tmp_path).mkdir()
        (directory_of(tmp_path) / "job.sbatch").touch()
    assert ran(tmp_path, "137 0") == (code, ["srun 0", "look", *more])


@pytest.mark.parametrize("state", ["allocated*", "down", "failing", "draining", "drained"])
def test_the_job_is_queued_again_without_a_node_that_is_down(tmp_path, state):
    code, calls = ran(tmp_path, "1 0", nodes=f"echo 'allocated\n{state}'")
    assert calls[:3] == ["srun 0", "requeue 12", "sleep 60"]
    assert code == 0


def test_srun_runs_again_beside_a_node_that_is_down_where_a_job_is_not_queued_again(tmp_path):
    assert ran(tmp_path, "1 0", nodes="echo down", requeue=False) == (0, ["srun 0", "sleep 0", "srun 1"])
