"""Parse the elastic agent's log: exit codes of workers, and the last output of a worker that could not start."""

from __future__ import annotations

import re
from collections import deque
from pathlib import Path

# torch.distributed.elastic: "failed (exitcode: -9) local_rank: 1 (pid: 12) of binary: ...", and in the closing report
# "exitcode  : -9 (pid: 12)".
_EXIT = re.compile(r"failed \(exitcode: (-?\d+)\) local_rank: \d+ \(pid: (\d+)\)|exitcode\s*: (-?\d+) \(pid: (\d+)\)")


def exit_codes(log: Path) -> dict[int, int]:
    """Return the exit code (negative: ended by that signal) of every worker that the agent reported, by pid."""
    try:
        text = log.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    found = {}
    for match in _EXIT.finditer(text):
        code, pid = (match[1], match[2]) if match[1] is not None else (match[3], match[4])
        found[int(pid)] = int(code)
    return found


def last_lines(log: Path, count: int) -> list[str]:
    """Return the last `count` lines that are not blank, each cut to 160 characters, without the agent's closing report.

    The closing report repeats exit codes between two lines of equal signs. It follows the output of a worker that could
    not start, which is what a reader needs.
    """
    lines: deque[str] = deque(maxlen=count)
    in_report = False
    try:
        with log.open(encoding="utf-8", errors="replace") as file:
            for line in map(str.rstrip, file):
                border = len(line) > 20 and set(line) == {"="}
                if line and not border and not in_report:
                    lines.append(line[:160])
                in_report ^= border
    except OSError:
        return []
    return list(lines)
