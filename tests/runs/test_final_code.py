"""The file by which a launcher tells the batch script that no restart cures its end."""

from __future__ import annotations

import pytest
import typer

from megalaunch.runs.errors import fail
from megalaunch.runs.final_code import final_code_written


@pytest.mark.parametrize(
    ("code", "written"),
    [(0, ""), (1, ""), (2, "2\n"), (3, "3\n"), (5, ""), (6, ""), (7, "7\n"), (75, "75\n"), (130, "130\n")],
)
def test_only_a_code_that_no_restart_cures_is_written(code, written, tmp_path):
    path = tmp_path / "final_code"
    path.touch()
    with pytest.raises(typer.Exit) as end, final_code_written({"MEGALAUNCH_FINAL_CODE": str(path)}):
        raise typer.Exit(code)
    assert (end.value.exit_code, path.read_text()) == (code, written)


@pytest.mark.parametrize("environment", [{}, {"MEGALAUNCH_FINAL_CODE": "/nowhere/logs/final_code"}])
def test_a_command_ends_as_it_would_without_the_file(environment):
    with pytest.raises(typer.Exit) as end, final_code_written(environment):
        fail("the data is damaged", 3)
    assert end.value.exit_code == 3
