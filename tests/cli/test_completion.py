"""Completion as a user meets it: the TAB key in a real bash and a real zsh, and what other shells ask for."""

from __future__ import annotations

import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from slow_cases import slow_but

from megalaunch.cli.completion import Line, completions, typed_line

BIN = Path(sys.executable).parent
MEGALAUNCH = str(BIN / "megalaunch")


class Terminal:
    """A shell on a terminal of its own, that is typed into and read until it shows what is waited for."""

    def __init__(self, argv, folder):
        self.pid, self.fd = pty.fork()
        if self.pid == 0:
            os.chdir(folder)
            environment = {
                "PATH": f"{BIN}:/usr/bin:/bin",
                "HOME": str(folder),
                "TERM": "dumb",
                "PS1": "$ ",
                "COLUMNS": "200",
            }
            os.execvpe(argv[0], argv, environment)
        self.seen = ""

    def type(self, text):
        os.write(self.fd, text.encode())

    def until(self, pattern, seconds=20.0):
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            plain = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|[\x07\x08]", "", self.seen)
            if re.search(pattern, plain):
                return plain
            if select.select([self.fd], [], [], 0.1)[0]:
                try:
                    self.seen += os.read(self.fd, 65536).decode(errors="replace")
                except OSError:
                    break
        raise AssertionError(f"{pattern!r} is not in what the shell showed:\n{self.seen}")

    def close(self):
        os.write(self.fd, b"\x03\x15exit\n")
        os.close(self.fd)
        os.waitpid(self.pid, 0)


def script_for(shell):
    environment = os.environ | {"_MEGALAUNCH_COMPLETE": f"source_{shell}"}
    return subprocess.run([MEGALAUNCH], env=environment, capture_output=True, text=True, check=True).stdout


@pytest.fixture
def bash(tmp_path):
    (tmp_path / "complete.sh").write_text(script_for("bash"))
    terminal = Terminal(["bash", "--norc", "--noprofile", "-i"], tmp_path)
    terminal.type("source complete.sh && echo rea''dy\n")
    terminal.until("ready")
    yield terminal
    terminal.close()


@pytest.fixture
def zsh(tmp_path):
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed here")
    (tmp_path / "complete.sh").write_text(script_for("zsh"))
    terminal = Terminal(["zsh", "-f", "-i"], tmp_path)
    terminal.type("autoload -Uz compinit && compinit -u && source ./complete.sh && echo rea''dy\n")
    terminal.until("ready")
    yield terminal
    terminal.close()


TYPED = [
    ("megalaunch vali\t", r"megalaunch validate-config "),
    ("megalaunch train recipe=quick\t", r"recipe=quickstart"),
    ("megalaunch validate-config recipe=llama3_\t\t", r"llama3_70b[\s\S]*llama3_8b"),
    ("megalaunch plan parallel.sequence_p\t", r"parallel\.sequence_parallel="),
    ("megalaunch train model.moe.num_ex\t", r"model\.moe\.num_experts="),
    ("megalaunch train optimizer.l\t", r"optimizer\.lr="),
    ("megalaunch train schedule.shape=cons\t", r"schedule\.shape=constant"),
    ("megalaunch train model=mixtral_8x7\t", r"model=mixtral_8x7b"),
    ("megalaunch validate-config --explain model.rope.the\t", r"--explain model\.rope\.theta"),
    ("megalaunch train --dry\t", r"--dry-run"),
    ("megalaunch sweep parallel=tp2,tp4ze\t", r"parallel=tp2,tp4zero"),
    ("megalaunch recipes show quick\t", r"recipes show quickstart"),
]


@pytest.mark.parametrize(("typed", "shown"), slow_but(TYPED, *TYPED[::3]), ids=[typed.strip() for typed, _ in TYPED])
def test_the_tab_key_in_bash(bash, typed, shown):
    bash.seen = ""
    bash.type(typed)
    bash.until(shown)


@pytest.mark.parametrize(("typed", "shown"), TYPED, ids=[typed.strip() for typed, _ in TYPED])
def test_the_tab_key_in_zsh(zsh, typed, shown):
    zsh.seen = ""
    zsh.type(typed)
    zsh.until(shown)


def test_no_space_follows_an_unfinished_argument(bash):
    bash.type("megalaunch train optimizer.l\t5 \t#\n")
    assert "optimizer.lr=5 " in bash.until(r"lr=5 .*#")


def offered(line):
    return [offer.text for offer in completions(line) or []]


@pytest.mark.parametrize(
    ("pieces", "cursor", "line"),
    [
        (["train", "recipe", "=", "ll"], 4, Line(("train",), "recipe=ll", "recipe=")),
        (["train", "recipe", "="], 3, Line(("train",), "recipe=", "recipe=")),
        (["train", "recipe", "=", ""], 4, Line(("train",), "recipe=", "recipe=")),
        (
            ["train", "recipe", "=", "a", "parallel", "=", "tp"],
            7,
            Line(("train", "recipe=a"), "parallel=tp", "parallel="),
        ),
        (["train", "recipe", "=", "a", ""], 5, Line(("train", "recipe=a"), "", "")),
        (["train", "re"], 2, Line(("train",), "re", "")),
        ([""], 1, Line((), "", "")),
    ],
)
def test_bashs_pieces_are_joined_to_arguments(pieces, cursor, line):
    environment = {"COMP_WORDS": "\n".join(["megalaunch", *pieces]), "COMP_CWORD": str(cursor)}
    assert typed_line("bash", environment) == line


def test_what_is_offered():
    assert {"recipe=", "model=", "model.", "train.", "batch."} <= set(offered(Line(("train",), "")))
    assert "train=" not in offered(Line(("train",), ""))
    assert offered(Line(("train",), "model.mtp.")) == ["model.mtp.num_layers=", "model.mtp.loss_coeff="]
    assert offered(Line(("train",), "model.mt"))[0] == "model.mtp.num_layers="
    assert offered(Line(("train",), "optimizer.lr")) == ["optimizer.lr=", "optimizer.lr=0.0003"]
    assert offered(Line(("train",), "train.compile=")) == ["train.compile=true", "train.compile=false"]
    assert "train.exit_at_step=null" in offered(Line(("train",), "train.exit_at_step="))
    assert offered(Line(("train",), "no.such=")) == offered(Line(("train",), "nothing")) == []
    assert "parallel=tp4pp2" in offered(Line(("train",), "parallel=tp4p"))
    assert "parallel=tp4tp2" not in offered(Line(("train",), "parallel=tp4"))
    assert "parallel=tp2,dp2" in offered(Line(("sweep",), "parallel=tp2,d"))
    assert offered(Line(("train",), "parallel=tp2,d")) == []


def test_what_is_left_to_typer():
    for line in (Line((), "tr"), Line(("doctor",), ""), Line(("train",), "--"), Line(("generate",), "x")):
        assert completions(line) is None


def test_every_key_can_be_completed():
    from megalaunch.config.keys import schema_keys

    assert all(f"{path}=" in offered(Line(("train",), path)) for path in schema_keys())


def ask(shell, **environment):
    return subprocess.run(
        [MEGALAUNCH], env=os.environ | {"_MEGALAUNCH_COMPLETE": f"complete_{shell}"} | environment,
        capture_output=True, text=True, check=False,
    )  # fmt: skip


def test_fish_and_powershell_are_answered():
    line = {"_TYPER_COMPLETE_ARGS": "megalaunch train recipe=quick"}
    assert ask("fish", _TYPER_COMPLETE_FISH_ACTION="get-args", **line).stdout.startswith("recipe=quickstart\t")
    assert ask("fish", _TYPER_COMPLETE_FISH_ACTION="is-args", **line).returncode == 0
    nothing = {"_TYPER_COMPLETE_ARGS": "megalaunch train recipe=nothing_like_it"}
    assert ask("fish", _TYPER_COMPLETE_FISH_ACTION="is-args", **nothing).returncode == 1
    answer = ask("powershell", _TYPER_COMPLETE_WORD_TO_COMPLETE="recipe=quick", **line).stdout
    assert answer.startswith("recipe=quickstart:::A small Llama")


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_no_name_or_comment_of_a_recipe_is_run(shell, request, tmp_path):
    """A folder of recipes of another hand: the shell shows their names, and evaluates nothing of them."""
    terminal = request.getfixturevalue(shell)
    folder = tmp_path / "recipes"
    folder.mkdir()
    evil = "$(touch ran1) `touch ran2` \"; touch ran3; \" '; touch ran4; ' )) ; touch ran5 ((\\$(touch ran6)"
    (folder / "evila.yaml").write_text(f"# @package _global_\n# {evil}\n")
    (folder / "evilb$(touch ran7)`touch ran8`'\"; touch ran9.yaml").write_text("# @package _global_\n# x: y\n")
    terminal.seen = ""
    terminal.type("megalaunch train recipe=ev\t\t\t")
    terminal.until(r"recipe=evil|evila")
    time.sleep(1.5)
    terminal.type("\t\t\n")  # the line is entered as completed
    time.sleep(1.5)
    assert list(tmp_path.glob("ran*")) == []


def test_completion_imports_neither_torch_nor_typer():
    program = (
        "import sys\nfrom megalaunch.cli.completion import complete\n"
        "complete({'_MEGALAUNCH_COMPLETE': 'complete_zsh', '_TYPER_COMPLETE_ARGS': 'megalaunch train recipe=ll'})\n"
        "print([name for name in ('torch', 'typer', 'hydra', 'numpy', 'rich') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
