"""Write the lines of a batch script that run srun: again after a failure, and the whole job again if that is needed."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from megalaunch.launch.supervise import LONGEST_PAUSE, RestartBudget
from megalaunch.launchers.launcher import Job
from megalaunch.launchers.slurm.elastic_lines import SAVED_TO_REGROUP, elastic_functions, elastic_settings, rejoins
from megalaunch.rundir.environment import ATTEMPT_VARIABLE, FINAL_CODE_VARIABLE
from megalaunch.rundir.outcome import NOT_RESTARTED, STOPPED_BETWEEN_ATTEMPTS, ExitCode
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.slurm import SlurmSpec

_NO_SIGNAL = '[ "$warned$stopped" = 00 ]'


def restarts_by_script(job: Job) -> bool:
    """Return whether the script starts the launchers of a run again: one of a single node restarts its own workers."""
    return job.nodes > 1 and job.settings.max_restarts > 0


def chooses_nodes(job: Job) -> bool:
    """Return whether the script chooses the nodes of each attempt: the job has spare ones, or may have fewer."""
    return restarts_by_script(job) and bool(job.fewer or job.settings.slurm.spare_nodes)


def requeues(slurm: SlurmSpec) -> bool:
    """Return whether the script itself queues its job again at the time limit."""
    return _has_requeues(slurm) and slurm.signal is not None


def _has_requeues(slurm: SlurmSpec) -> bool:
    return slurm.requeue and slurm.max_requeues > 0


def takes_stop(job: Job) -> bool:
    """Return whether the script takes the signal to stop: one without traps has a step from its start to its end."""
    return restarts_by_script(job) or requeues(job.settings.slurm)


def stop_signal(slurm: SlurmSpec) -> str:
    """Return the signal by which a script is told to stop: the one of the two for users that is not the warning.

    Slurm sends SIGTERM to a script that it ends, and to the launchers, which a second signal would keep from saving.
    """
    return "USR1" if _warning(slurm) == "USR2" else "USR2"


def _warning(slurm: SlurmSpec) -> str:
    return str(slurm.signal).partition("@")[0]


def lines_once(srun: str, slurm: SlurmSpec) -> list[str]:
    """Return the lines that run srun, and queue the job again if the time limit has ended it.

    srun's own exit code does not tell, as it is the largest of all tasks: 75 of one that srun ended for another's
    failure. So the warning goes to this script, which remembers it and passes it to srun, and srun to all processes.
    """
    if not requeues(slurm):
        return [srun]
    return [*_signals(slurm), *_REQUEUE, f"{srun} &", 'await "$!"; code=$ended', *_end(slurm)]


def lines_with_restarts(srun: str, words: Mapping[int, str], job: Job) -> list[str]:
    """Return the lines that run a command by srun, and again after a failure, as often in a row as the spec allows.

    No task is ended for another's failure, so that 75 means a stop. After a failure all launchers end by themselves:
    what is left a while later, srun kills, and then ends with 137. A launcher that ends for a reason that no restart
    cures therefore writes its code to a file; the file is there before, as a network file system caches its absence.
    The script runs outside of the container of the tasks, where no Python may be. Where a node does not answer, the
    job is queued again, since Slurm gives it other nodes; one that chooses its nodes, only where too few answer.

    Args:
        words: the command for each number of nodes, quoted for the shell.
    """
    slurm, directory = job.settings.slurm, RunDirectory(job.directory)
    pauses, commands = list(_pauses(job)), {nodes: f"{srun} {command}" for nodes, command in words.items()}
    parts = _choosing_parts(job, commands) if chooses_nodes(job) else _plain_parts(slurm, commands[job.nodes])
    attempt = [
        f': > "${FINAL_CODE_VARIABLE}"',
        *parts.start,
        'code=$ended; reason="srun ended with exit code $code"',
        f'final="$(cat "${FINAL_CODE_VARIABLE}")"; code="${{final:-$code}}"; rm -f "${FINAL_CODE_VARIABLE}"',
        f'{parts.restarts}case "$code" in {_pattern(*NOT_RESTARTED, 128 + signal.SIGTERM)}) break ;; esac',
        f"{_NO_SIGNAL} || break",
        *parts.after_failure,
        *_end_without_directory(srun, directory),
        'now="$(saved)"; [[ ! "$now" > "$newest" ]] || { newest="$now"; used=0; }',
        f'[ "$used" -lt {job.settings.max_restarts} ] && {_NO_SIGNAL} || break',
        f'pause="${{pauses[used < {len(pauses) - 1} ? used : {len(pauses) - 1}]}}"',
        'sleep "$pause" & await "$!"',
        f"{_NO_SIGNAL} || break",
        "record_restart",
    ]
    return [
        *_signals(slurm, regroups=chooses_nodes(job) and (rejoins(job) or slurm.replace_stragglers)),
        *(_REQUEUE if _has_requeues(slurm) else []),
        *_functions(directory),
        *parts.functions,
        f"pauses=({' '.join(pauses)})  # seconds before each restart in a row",
        f"export {ATTEMPT_VARIABLE}=0 {FINAL_CODE_VARIABLE}={shlex.quote(str(directory.final_code))}",
        f'used=0; newest="$(saved)"; code={int(ExitCode.PREEMPTED)}',
        *parts.first,
        f"while {_NO_SIGNAL}; do",
        *(f"    {line}" for line in attempt),
        "done",
        f'case "$code" in {_pattern(*NOT_RESTARTED)}) ;; *) [ "$stopped" = 0 ] || record_stop ;; esac',
        *(_end(slurm) if requeues(slurm) else ['exit "$code"']),
    ]


@dataclass(frozen=True)
class _Parts:
    """Lines of a script with restarts that depend on whether it chooses its nodes.

    Attributes:
        functions: that the others call.
        first: before the first attempt.
        start: start the launchers, and wait for the end of srun.
        restarts: conditions under which an exit code is no end of the job, each before `||`.
        after_failure: before the next attempt.
    """

    functions: list[str]
    first: list[str]
    start: list[str]
    restarts: str
    after_failure: list[str]


def _plain_parts(slurm: SlurmSpec, command: str) -> _Parts:
    """Return the lines of a job that runs on all its nodes alone."""
    return _Parts([], [], [f"{command} &", 'await "$!"'], "", _requeue_without_nodes(slurm))


def _choosing_parts(job: Job, commands: Mapping[int, str]) -> _Parts:
    """Return the lines of a job that has spare nodes, or may continue on fewer."""
    slurm = job.settings.slurm
    may_requeue = _has_requeues(slurm)
    replaces = slurm.replace_stragglers
    start = ["regroup=0; choose_nodes", f"{_NO_SIGNAL} || break"]
    if may_requeue:
        start.append(f'[ "$size" != 0 ] || {{ {_may_requeue(slurm)} && requeue "too few of its nodes answer"; }}')
    if replaces:
        start.append('rm -f "$slow_nodes"; seen="$(number_of_events)"')
    start.append("start & step=$!")
    if rejoins(job):
        start.append('[ "$size" = 0 ] || [ "$size" = "$wanted" ] || watch_lost "$step" &')
    if replaces:
        start.append('[ "$size" = 0 ] || watch_slow "$step" "$seen" &')
    start.append('await "$step"')
    failed_nodes = f'{{ [ "$code" = {int(ExitCode.CONFIGURATION)} ] && leave_out_failed; }}'
    return _Parts(
        elastic_functions(job, commands, _requeues_left(slurm) if may_requeue else ""),
        elastic_settings(job),
        start,
        f"{SAVED_TO_REGROUP} || {failed_nodes} || ",
        [
            f'! {SAVED_TO_REGROUP} || {{ reason="lost nodes are back"{"; leave_out_slow" if replaces else ""}; }}',
            f'[ "$size" != 1 ] || case "$code" in {_pattern(ExitCode.CRASH, ExitCode.HANG)}) break ;; esac'
            "  # its launcher has restarted its workers",
        ],
    )


def _pattern(*codes: int) -> str:
    return " | ".join(str(int(code)) for code in codes)


def _pauses(job: Job) -> Iterator[str]:
    """Yield the seconds before each restart in a row, up to the last that differs from the one before."""
    budget, before = RestartBudget(job.settings.max_restarts, job.settings.restart_backoff), 0.0
    while (pause := budget.take()) is not None:
        yield f"{pause:.15g}"
        if pause == LONGEST_PAUSE or (budget.used > 1 and pause == before):
            return
        before = pause


def _functions(directory: RunDirectory) -> list[str]:
    events, outcome = shlex.quote(str(directory.events)), shlex.quote(str(directory.outcome))
    checkpoints = shlex.quote(str(directory.checkpoints))
    event = '{"time": %s, "event": "restart", "attempt": %d, "reason": "%s", "pause_seconds": %s}\\n'
    stop = f'"exit_code": {int(ExitCode.PREEMPTED)}, "reason": "{STOPPED_BETWEEN_ATTEMPTS}"'
    end, stopped = f'{{"time": %s, "event": "outcome", {stop}}}\\n', f'{{{stop}, "step": %d, "details": {{}}}}\\n'
    return [
        "saved() {  # the newest checkpoint",
        "    local path=; shopt -s nullglob",
        f"    for path in {checkpoints}/step_????????; do :; done",
        '    echo "${path##*/}"',
        "}",
        "record_restart() {",
        f"    used=$((used + 1)); {ATTEMPT_VARIABLE}=$(({ATTEMPT_VARIABLE} + 1))",
        f'    echo "restart ${ATTEMPT_VARIABLE}: $reason"',
        f'    printf {shlex.quote(event)} "$(date +%s.%N)" "${ATTEMPT_VARIABLE}" "$reason" "$pause" >> {events}',
        f"    rm -f {outcome}  # it is that of the attempt that failed",
        "}",
        "record_stop() {  # no launcher is there to do it",
        f'    local step="$(saved)"; code={int(ExitCode.PREEMPTED)}',
        f'    printf {shlex.quote(stopped)} "$((10#0${{step#step_}}))" > {outcome}',
        f'    printf {shlex.quote(end)} "$(date +%s.%N)" >> {events}',
        "}",
    ]


def _signals(slurm: SlurmSpec, regroups: bool = False) -> list[str]:
    """Return the lines that take a warning of the time limit and a stop, and `await`, which a signal does not end.

    Both reach srun as SIGUSR1, which it passes to the launchers; after a SIGTERM it would kill them. A second signal
    would end them without a checkpoint, so that only a stop is repeated. `await` also gives a signal to a process that
    started after it.

    Args:
        regroups: also take the signal of the script itself that other nodes are to take part, after which the workers
            save too.
    """
    regroup, zero = ("$regroup", "0") if regroups else ("", "")
    warn = f"""trap 'heard=1; [ "$warned$stopped{regroup}" != 00{zero} ] || {{ warned=1; pass_on; }}; warned=1' """
    stop = f"""trap 'heard=1; stopped=1; [ "$warned{regroup}" != 0{zero} ] || pass_on' """
    return [
        "warned=0; stopped=0; child=",
        "pass_on() {  # not to a copy of this shell, which would lose it before it becomes the program",
        '    sleep 1; kill -USR1 "$child" 2>/dev/null',
        "}",
        *([f"{warn}{_warning(slurm)}  # the time limit is near: the workers save"] if requeues(slurm) else []),
        f"{stop}{stop_signal(slurm)}  # megalaunch stop",
        *([_REGROUP] if regroups else []),
        "await() {  # the exit code of process $1, to `ended`",
        "    local status; child=$1; ended=127; heard=1",
        f"    {_NO_SIGNAL} || pass_on",
        '    while [ "$heard" = 1 ]; do  # a trap ends a wait',
        '        heard=0; wait "$child" 2>/dev/null; status=$?',
        '        [ "$status" -eq 127 ] || ended=$status  # 127: it had ended before',
        "    done",
        "}",
    ]


# Other nodes are to take part: the workers save.
_REGROUP = """trap 'heard=1; [ "$warned$stopped$regroup" != 000 ] || { regroup=1; pass_on; }' ALRM"""
_REQUEUE = [
    "requeue() {  # $1: the reason",
    '    echo "job $SLURM_JOB_ID is queued again: $1"',
    '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script meanwhile',
    "}",
]


def _may_requeue(slurm: SlurmSpec) -> str:
    return f'[ "$stopped" = 0 ] && {_requeues_left(slurm)}'


def _requeues_left(slurm: SlurmSpec) -> str:
    return f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {slurm.max_requeues} ]'


def _requeue_without_nodes(slurm: SlurmSpec) -> list[str]:
    """Return the lines that queue the job again if a node of it is down or does not answer, shown by a star."""
    if not _has_requeues(slurm):
        return []
    states = 'sinfo --noheader --nodes="$SLURM_JOB_NODELIST" --format=%T'
    return [
        f"if {states} | grep -q -e down -e drain -e fail -e '[*]' && {_may_requeue(slurm)}; then",
        '    requeue "a node of it is down, drained or does not answer"',
        "fi",
    ]


def _end_without_directory(srun: str, directory: RunDirectory) -> list[str]:
    """Return the lines that end the job if a node does not see the run directory, where its launcher left no code."""
    refused = int(ExitCode.CONFIGURATION)
    look = shlex.join(["sh", "-c", f'[ -f "$0" ] || exit {refused}', str(directory.batch_script)])
    return [
        f'if [ "${ATTEMPT_VARIABLE}:$code" = 0:{128 + signal.SIGKILL} ]; then',
        f"    {srun} {look} &",
        f'    await "$!"; [ "$ended" -ne {refused} ] || {{ code={refused}; break; }}',
        "fi",
    ]


def _end(slurm: SlurmSpec) -> list[str]:
    """Return the last lines: after a warning the job is queued again, unless it ended for another reason."""
    final = _pattern(*(code for code in NOT_RESTARTED if code != ExitCode.PREEMPTED))
    return [
        f'case "$code" in {final}) exit "$code" ;; esac',
        f'[ "$warned" = 1 ] && {_may_requeue(slurm)} && requeue "its time limit is near"',
        'exit "$code"',
    ]
