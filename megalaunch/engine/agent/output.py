"""The agent's own lines, among the output of its workers, which write their logs themselves."""

from __future__ import annotations

import os
import sys

from torch.distributed.elastic.multiprocessing.api import LogsDest, LogsSpecs


def log(line: str) -> None:
    """Print one line to stderr."""
    print(f"megalaunch: {line}", file=sys.stderr, flush=True)


class NoLogFiles(LogsSpecs):
    """Leave the workers' output alone. torch's default leaves a folder of temporary files for each launch."""

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Return no file for any of the workers, whose environments are `envs`."""
        for environment in envs.values():
            environment["TORCHELASTIC_ERROR_FILE"] = ""
        unchanged = dict.fromkeys(envs, "")
        return LogsDest(stdouts=unchanged, stderrs=unchanged, error_files=dict.fromkeys(envs, os.devnull))

    @property
    def root_log_dir(self) -> str:
        """No folder."""
        return os.devnull
