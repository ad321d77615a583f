"""A reader that goes away (`megalaunch train ... | head -3`) ends no work that makes files."""

import os
import subprocess
import sys

from training import tiny_overrides

_LOSSY = """
import os, sys
from megalaunch.cli.output.closed_output import ignore_broken_pipe
ignore_broken_pipe()
for number in range(3):
    print("line", number, flush=True)
os.write(1, b"from below\\n")
print("done", file=sys.stderr)
"""


def run_without_a_reader(*command, cwd=None):
    """The process, its standard output a pipe that nobody reads."""
    reading, writing = os.pipe()
    os.close(reading)
    try:
        return subprocess.run(command, stdout=writing, stderr=subprocess.PIPE, text=True, timeout=120, cwd=cwd)
    finally:
        os.close(writing)


def test_what_is_printed_is_lost_and_nothing_else():
    done = run_without_a_reader(sys.executable, "-c", _LOSSY)
    assert (done.returncode, done.stderr) == (0, "done\n")
    without = _LOSSY.replace("\nignore_broken_pipe()", "")
    assert "BrokenPipeError" in run_without_a_reader(sys.executable, "-c", without).stderr


def test_train_goes_on(tmp_path):
    command = [sys.executable, "-m", "megalaunch", "train", "--prepare-only", *tiny_overrides(tmp_path)]
    done = run_without_a_reader(*command, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "run" / "spec.yaml").is_file()


def test_a_full_disk_is_still_an_error(tmp_path):
    program = _LOSSY.replace("print(", "print('x' * 100000, ", 1)
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-c", program], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert "No space left" in done.stderr


def test_hydras_own_views_end_in_silence():
    command = [sys.executable, "-m", "megalaunch", "validate-config", "recipe=tiny", "--info", "defaults-tree"]
    assert run_without_a_reader(*command).stderr == ""
