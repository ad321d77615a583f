"""Write docs/reference/exit-codes.md: every exit code, from the table of the failure report."""

from __future__ import annotations

from megalaunch.rundir.outcome import EXIT_MEANINGS, ExitCode

_HEAD = """\
# Exit codes

This page is generated: `scripts/reference` writes it from `megalaunch/rundir/outcome.py`, and a test fails when it is
stale.

Every command ends with one of these. For a launch the code is also in `outcome.json` and in the last
[event](events.md#outcome), and `megalaunch watch` ends with that of the run that it shows. A failed launch ends with a
[report](../run_directory.md#crashes) whose first line is the title and whose last line says what to do.
`megalaunch explain CODE` prints a row of this page.

| code | title | causes | what to do |
| --- | --- | --- | --- |
"""
_END = """
- Without a report of its own, code 1 with a Python traceback is an error of megalaunch itself:
  [report it](../troubleshooting.md#report-a-bug).
- In a script, `75` and `130` mean "run the same command again"; schedulers of jobs know 75 as a temporary failure
  (`EX_TEMPFAIL`).
- Workers that end on purpose write the outcome and exit with 0: the codes are the launcher's.
"""


def exit_codes_page() -> str:
    """Return the page's text."""
    rows = [
        f"| {int(code)} | {meaning.title} | {meaning.cause} | {meaning.action} |"
        for code, meaning in EXIT_MEANINGS.items()
    ]
    return _HEAD + "\n".join(rows) + "\n" + _END


def describe_exit_code(number: str) -> str | None:
    """Return an exit code as text for a terminal; None if there is none of that number."""
    code = next((code for code in ExitCode if str(int(code)) == number), None)
    if code is None:
        return None
    meaning = EXIT_MEANINGS[code]
    return f"exit code {number}: {meaning.title}\n\n  causes  {meaning.cause}\n  next    {meaning.action}"
