"""Write the lines of a batch script that run srun: again after a failure, and the whole job again if that is needed."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from megalaunch.launch.supervise import LONGEST_PAUSE, RestartBudget
from megalaunch.launchers.launcher import Job
from megalaunch.rundir.environment import ATTEMPT_VARIABLE
from megalaunch.rundir.outcome import NOT_RESTARTED
from megalaunch.rundir.paths import RunDirectory
from megalaunch.schema.slurm import SlurmSpec


def restarts_by_script(job: Job) -> bool:
    """Return whether the script starts the launchers of a run again: one of a single node restarts its own workers."""
    return job.nodes > 1 and job.settings.max_restarts > 0


def requeues(slurm: SlurmSpec) -> bool:
    """Return whether the script itself queues its job again."""
    return slurm.requeue and slurm.signal is not None and slurm.max_requeues > 0


def lines_once(srun: str, slurm: SlurmSpec) -> list[str]:
    """Return the lines that run srun, and queue the job again if the time limit has ended it.

    srun's own exit code does not tell, as it is the largest of all tasks: 75 of one that srun ended for another's
    failure. So the warning goes to this script, which remembers it and passes it to srun, and srun to all processes.
    """
    if not requeues(slurm):
        return [srun]
    return [*_trap(slurm), *_run(srun), *_end(slurm)]


def lines_with_restarts(srun: str, job: Job) -> list[str]:
    """Return the lines that run srun again after a failure, as often in a row as the spec allows.

    No task is ended for another's failure, so that 75 means a stop. After a failure all launchers end by themselves:
    what is left a while later, srun ends. The script runs outside of the container of the tasks, where no Python may
    be. Where a node does not answer, the job is queued again, since Slurm gives it other nodes.
    """
    slurm, directory = job.settings.slurm, RunDirectory(job.directory)
    final = " | ".join(str(int(code)) for code in NOT_RESTARTED)
    pauses = list(_pauses(job))
    return [
        *(_trap(slurm) if requeues(slurm) else ["warned=0"]),
        *_functions(directory),
        f"pauses=({' '.join(pauses)})  # seconds before each restart in a row",
        f'export {ATTEMPT_VARIABLE}=0; used=0; newest="$(saved)"',
        "while :; do",
        *(f"    {line}" for line in _run(srun)),
        f'    case "$code" in {final}) break ;; esac',
        '    [ "$warned" = 0 ] || break',
        *(f"    {line}" for line in _requeue_without_nodes(slurm)),
        '    now="$(saved)"; [[ ! "$now" > "$newest" ]] || { newest="$now"; used=0; }',
        f'    [ "$used" -lt {job.settings.max_restarts} ] || break',
        f'    pause="${{pauses[used < {len(pauses) - 1} ? used : {len(pauses) - 1}]}}"',
        f"    used=$((used + 1)); {ATTEMPT_VARIABLE}=$(({ATTEMPT_VARIABLE} + 1))",
        "    restarting",
        '    sleep "$pause" & wait "$!"',
        '    [ "$warned" = 0 ] || break',
        "done",
        *(_end(slurm) if requeues(slurm) else ['exit "$code"']),
    ]


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
    reason = "srun ended with exit code %d"
    event = f'{{"time": %s, "event": "restart", "attempt": %d, "reason": "{reason}", "pause_seconds": %s}}\\n'
    return [
        "saved() {  # the newest checkpoint",
        "    local path=; shopt -s nullglob",
        f"    for path in {checkpoints}/step_????????; do :; done",
        '    echo "${path##*/}"',
        "}",
        "restarting() {",
        f'    printf "restart %d: {reason}\\n" "${ATTEMPT_VARIABLE}" "$code"',
        f'    printf {shlex.quote(event)} "$(date +%s.%N)" "${ATTEMPT_VARIABLE}" "$code" "$pause" >> {events}',
        f"    rm -f {outcome}  # it is that of the attempt that failed",
        "}",
    ]


def _trap(slurm: SlurmSpec) -> list[str]:
    name = str(slurm.signal).partition("@")[0]
    warn = f'trap "" {name}; warned=1; kill -{name} "$srun" 2>/dev/null'
    return ["warned=0", f"trap '{warn}' {name}  # the time limit is near: the workers save"]


def _run(srun: str) -> list[str]:
    return [
        f"{srun} &",
        "srun=$!",
        'wait "$srun"; code=$?',
        'if [ "$warned" = 1 ]; then  # the trap ended the wait; 127: srun had ended before',
        '    wait "$srun"; ended=$?; [ "$ended" -eq 127 ] || code=$ended',
        "fi",
    ]


def _may_requeue(slurm: SlurmSpec) -> str:
    return f'[ "${{SLURM_RESTART_COUNT:-0}}" -lt {slurm.max_requeues} ]'


_REQUEUE = '    scontrol requeue "$SLURM_JOB_ID" && sleep 60  # Slurm ends this script meanwhile'


def _requeue_without_nodes(slurm: SlurmSpec) -> list[str]:
    """Return the lines that queue the job again if a node of it is down or does not answer, shown by a star."""
    if not slurm.requeue or slurm.max_requeues == 0:
        return []
    states = 'sinfo --noheader --nodes="$SLURM_JOB_NODELIST" --format=%T'
    return [f"if {states} | grep -q -e down -e fail -e '[*]' && {_may_requeue(slurm)}; then", _REQUEUE, "fi"]


def _end(slurm: SlurmSpec) -> list[str]:
    return [
        f'if [ "$warned" = 1 ] && [ "$code" -ne 0 ] && {_may_requeue(slurm)}; then',
        _REQUEUE,
        "fi",
        'exit "$code"',
    ]
