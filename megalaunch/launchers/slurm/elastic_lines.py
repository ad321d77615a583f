"""Write the lines of a batch script that chooses the nodes of each attempt: those that answer, spare ones, or fewer.

A job with `--no-kill` keeps its other nodes when Slurm marks one down. That node leaves the job and never returns to
it; one that only did not answer for a while is still there. The loss of the node of the script would leave a job
without a script until its time limit, so that the other nodes look after it.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping

from megalaunch.launchers.launcher import Job
from megalaunch.launchers.slurm.slow_node_lines import slow_node_functions
from megalaunch.rundir.outcome import FAILED_NODES, ExitCode
from megalaunch.rundir.paths import RunDirectory

ON_CHOSEN = '"${on[@]}"'
"""Word of a command line of srun: the options that name the chosen nodes."""
SAVED_TO_REGROUP = f'[ "$regroup:$code" = 1:{int(ExitCode.PREEMPTED)} ]'
"""Condition of the shell: the launchers have saved and ended so that other nodes can take part."""
_GUARD_SECONDS = 30  # between two looks after the node of the script, by all other nodes together


def elastic_settings(job: Job) -> list[str]:
    """Return the variables that the functions read; at first every node of the job may take part."""
    directory = RunDirectory(job.directory)
    sizes = sorted({job.nodes, *job.fewer}, reverse=True)
    values = {"events": str(directory.events), "outcome": str(directory.outcome)}
    return [
        f"sizes='{' '.join(map(str, sizes))}'; wanted={job.nodes}; told={job.nodes}; regroup=0",
        "declare -A left_out=()  # why these nodes of the job take no part",
        *(f"{name}={shlex.quote(value)}" for name, value in values.items()),
        'chosen="$(scontrol show hostnames "$SLURM_JOB_NODELIST" | paste -sd,)"',
        "guard",
    ]


def elastic_functions(job: Job, commands: Mapping[int, str], may_requeue: str) -> list[str]:
    """Return the functions that choose nodes and start the launchers on them.

    Args:
        commands: the line that starts the launchers, for each number of nodes.
        may_requeue: the condition of the shell under which the job may be queued again; "": never.
    """
    return [
        *_CHOOSE.splitlines(),
        "start() {  # the launchers, on the chosen nodes",
        '    case "$size" in',
        *(f"        {size}) exec {commands[size]} ;;" for size in sorted(commands, reverse=True)),
        f"        *) exit {int(ExitCode.CRASH)} ;;",
        "    esac",
        "}",
        *(_WATCH_LOST.replace("EVERY", str(job.settings.rejoin_every)).splitlines() if rejoins(job) else []),
        *(slow_node_functions(job) if job.settings.slurm.replace_stragglers else []),
        *_guard(may_requeue),
    ]


def rejoins(job: Job) -> bool:
    """Return whether the script asks lost nodes, while the run has fewer than it wants, whether they are back."""
    return bool(job.fewer) and job.settings.rejoin_every > 0


# A step that was killed holds its nodes until the lost one of them is marked down, so that the next must overlap.
# srun gives up a node that does not answer after 10 seconds or more.
_CHOOSE = r"""answering() {  # the nodes of the job that start a process, in Slurm's order
    local names name state list= count=0
    names="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N)"  # without those that Slurm has marked down
    while read -r name state; do
        case "$state" in *down* | *drain* | *fail* | *'*'*) continue ;; esac
        [[ -n "${left_out[$name]}" || " ${list//,/ } " = *" $name "* ]] || { list="$list,$name"; count=$((count + 1)); }
    done < <(sinfo --noheader --Node --nodes="${names:-$SLURM_JOB_NODELIST}" --format='%N %T')
    [ "$count" = 0 ] || timeout 60 srun --nodes="$count" --ntasks="$count" --nodelist="${list#,}" \
        --ntasks-per-node=1 --cpu-bind=none --overlap --no-kill \
        sh -c 'echo "$SLURM_NODEID $SLURMD_NODENAME"' 2>/dev/null | sort -n | cut -d ' ' -f 2
}
fits() {  # the largest valid number of nodes among $1; 0: there is none
    local number
    for number in $sizes 0; do [ "$1" -lt "$number" ] || break; done
    echo "$number"
}
choose_nodes() {  # to `chosen`, their number to `size`: those of the last attempt first; the others are spare
    local before="$chosen" all name found=() others=()
    all="$(answering | paste -sd ' ')"
    for name in $all; do
        if [[ ",$before," = *",$name,"* ]]; then found+=("$name"); else others+=("$name"); fi
    done
    found+=("${others[@]}"); size="$(fits "${#found[@]}")"
    [ "$size" != 0 ] || return 0
    chosen=
    for name in $all; do [[ " ${found[*]:0:size} " != *" $name "* ]] || chosen="$chosen,$name"; done
    chosen="${chosen#,}"; on=(--nodes="$size" --ntasks="$size" --nodelist="$chosen")
    tell_change "$before" "$all"
}
tell_change() {  # $1: the nodes before; $2: those that answer
    local name why= format comma='", "'
    for name in ${1//,/ }; do
        if [ -n "${left_out[$name]}" ]; then
            why="$why, $name ${left_out[$name]}"
        elif [[ " $2 " != *" $name "* ]]; then
            why="$why, $name does not answer"
        fi
    done
    [ "$size" -le "$told" ] || for name in ${chosen//,/ }; do
        [[ ",$1," = *",$name,"* ]] || why="$why, $name is back"
    done
    why="${why#, }"; [ -n "$why" ] || return 0
    echo "the run continues on $chosen: $why"
    if [ "$size" = "$told" ]; then
        printf '{"time": %s, "event": "note", "message": "the run continues on %s: %s"}\n' \
            "$(date +%s.%N)" "$chosen" "$why" >> "$events"
    else
        format='{"time": %s, "event": "nodes_changed", "nodes": %d, "wanted": %d, "hosts": ["%s"], "reason": "%s"}\n'
        printf "$format" "$(date +%s.%N)" "$size" "$wanted" "${chosen//,/$comma}" "$why" >> "$events"
    fi
    told="$size"
}
leave_out_failed() {  # the nodes that failed the preflight, if the run can start without them
    local rank ranks nodes=(${chosen//,/ })
    ranks="$(tr -d '[:space:]' < "$outcome" | sed -n 's/.*"FAILED_NODES":\[\([0-9,]*\)\].*/\1/p')"
    for rank in ${ranks//,/ }; do left_out[${nodes[rank]}]="failed the preflight"; done
    [ -n "$ranks" ] && [ "$(fits "$(answering | wc -l)")" != 0 ]
}""".replace("FAILED_NODES", FAILED_NODES)

_WATCH_LOST = r"""watch_lost() {  # beside process $1: once more nodes can take part, let the workers save and end
    local seen now saves=0
    seen="$(saved)"
    while sleep 1 && kill -0 "$1" 2>/dev/null; do
        now="$(saved)"; [[ "$now" > "$seen" ]] || continue
        seen="$now"; saves=$((saves + 1))
        [ $((saves % EVERY)) = 0 ] && [ "$(fits "$(answering | wc -l)")" -gt "$size" ] || continue
        ! kill -0 "$1" 2>/dev/null || kill -ALRM $$
        return
    done
}"""


def _guard(may_requeue: str) -> list[str]:
    """Return the function that lets the other nodes queue the job again, or end it, once that of the script is lost."""
    end = 'scancel "$SLURM_JOB_ID"'
    if may_requeue:
        end = f'if {may_requeue}; then scontrol requeue "$SLURM_JOB_ID"; else {end}; fi'
    return [
        "guard() {  # the other nodes look after that of this script, in turn",
        "    local others=$((SLURM_JOB_NUM_NODES - 1))",
        '    srun --nodes="$others" --ntasks="$others" --exclude="$SLURMD_NODENAME" --ntasks-per-node=1 \\',
        "        --cpu-bind=none --overlap --no-kill --output=/dev/null --error=/dev/null sh -c '",
        f"            sleep $((SLURM_NODEID * {_GUARD_SECONDS}))",
        f"            while sleep $((SLURM_STEP_NUM_NODES * {_GUARD_SECONDS})); do",
        '                names="$(squeue --noheader --jobs="$SLURM_JOB_ID" --format=%N)"',
        '                [ -n "$names" ] && ! scontrol show hostnames "$names" | grep -qxF "$0" || continue',
        f"                {end}; sleep 600",
        '            done\' "$SLURMD_NODENAME" 2>/dev/null &',
        "}",
    ]
