"""Write the functions of a batch script that replaces slow nodes by spare ones of the job.

They read the events of the run as text: the script runs where no Python may be.
"""

from __future__ import annotations

import shlex

from megalaunch.launchers.launcher import Job
from megalaunch.launchers.slow_nodes import CAUSES, COMPUTED_SLOWER, HAD_SLOWER_LINKS
from megalaunch.rundir.paths import RunDirectory

_NODES = r"\([0-9][0-9, ]*\)"
_CAUSES = r"\|".join(CAUSES)
_NAMED = (
    rf'/"event": "straggler".*"cause": "\({_CAUSES}\)"/s/.*"nodes": \[{_NODES}\].*/\1:{COMPUTED_SLOWER}/p',
    rf'/"event": "network"/s/.*"slow_nodes": \[{_NODES}\].*/\1:{HAD_SLOWER_LINKS}/p',
)
"""Commands of sed that give NODES:HOW of each event that `slow_nodes` of `launchers/slow_nodes.py` reads."""

_FUNCTIONS = r"""number_of_events() {
    cat "$events" 2>/dev/null | wc -l
}
watch_slow() {  # beside process $1, after event $2: once spare nodes can replace slow ones, let the workers save, end
    local seen="$2" now ranks how rank slow nodes=(${chosen//,/ })
    while sleep 1 && kill -0 "$1" 2>/dev/null; do
        now="$(number_of_events)"; [ "$now" -gt "$seen" ] || continue
        while IFS=: read -r ranks how; do
            slow=; for rank in ${ranks//,/ }; do slow="$slow ${nodes[rank]}"; done
            [ "$(answering < /dev/null | grep -cvxF "$(printf '%s\n' $slow)")" -ge "$size" ] || continue
            echo "$ranks:$how" > "$slow_nodes"
            ! kill -0 "$1" 2>/dev/null || kill -ALRM $$
            return
        done < <(sed -n "$((seen + 1)),${now}p" "$events" | sed -n NAMED)
        seen="$now"
    done
}
leave_out_slow() {  # those that `watch_slow` has found, named in `reason`
    local ranks how rank names= nodes=(${chosen//,/ })
    [ -f "$slow_nodes" ] && IFS=: read -r ranks how < "$slow_nodes" || return 0
    for rank in ${ranks//,/ }; do
        left_out[${nodes[rank]}]="$how"; names="$names and node $rank (${nodes[rank]})"
    done
    reason="${names# and } $how"
}"""


def slow_node_functions(job: Job) -> list[str]:
    """Return the functions, and the variable of the file by which one tells the other."""
    named = " ".join(f"-e {shlex.quote(command)}" for command in _NAMED)
    path = shlex.quote(str(RunDirectory(job.directory).slow_nodes))
    return [f"slow_nodes={path}", *_FUNCTIONS.replace("NAMED", named).splitlines()]
