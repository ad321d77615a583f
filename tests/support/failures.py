"""Print each failure when it happens: a run that is cut off has said what failed."""

from __future__ import annotations

import pytest


class FailurePrinter:
    """Prints the name and the last line of each failed test; pytest prints the rest at the end."""

    def __init__(self, terminal: pytest.TerminalReporter) -> None:
        self.terminal = terminal

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """Print one line for a failure."""
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            reason = str(crash.message if crash else report.longrepr).partition("\n")[0]
            self.terminal.write_line(f"\nFAILED {report.nodeid} ({report.when}): {reason}")


@pytest.hookimpl(trylast=True)  # the terminal reporter is there then
def pytest_configure(config: pytest.Config) -> None:
    """Install the printer where the reports are shown, not in the workers of pytest-xdist."""
    terminal = config.pluginmanager.get_plugin("terminalreporter")
    if terminal is not None and not hasattr(config, "workerinput"):
        config.pluginmanager.register(FailurePrinter(terminal))
