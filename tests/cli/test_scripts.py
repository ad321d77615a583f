"""scripts/run and its set-up: in place, first use, changes, interruptions, two at once, and every clear failure."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from paths import ROOT

# A stand-in for the project that pip can install without downloading anything.
PYPROJECT = """
[build-system]
requires = []
build-backend = "backend"
backend-path = ["."]
"""
BACKEND = """
import os, time, zipfile

def build_editable(folder, config_settings=None, metadata_directory=None):
    time.sleep(float(os.environ.get("SLOW_BUILD", "0")))
    info = "megalaunch-0.1.0.dist-info/"
    files = {
        "megalaunch_stand_in.py": "import sys\\ndef main():\\n    print('stand-in', *sys.argv[1:])\\n",
        info + "METADATA": "Metadata-Version: 2.1\\nName: megalaunch\\nVersion: 0.1.0\\n"
                           "Provides-Extra: train\\nProvides-Extra: dev\\n" + os.environ.get("NEEDS", ""),
        info + "WHEEL": "Wheel-Version: 1.0\\nGenerator: x\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n",
        info + "entry_points.txt": "[console_scripts]\\nmegalaunch = megalaunch_stand_in:main\\n",
    }
    files[info + "RECORD"] = "".join(f"{name},,\\n" for name in files)
    name = "megalaunch-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(os.path.join(folder, name), "w") as wheel:
        for path, text in files.items():
            wheel.writestr(path, text)
    return name
"""


@pytest.fixture
def project(tmp_path):
    """A folder with our scripts and the stand-in project, under a path with a space."""
    root = tmp_path / "a checkout"
    root.mkdir()
    shutil.copytree(ROOT / "scripts", root / "scripts")
    (root / "pyproject.toml").write_text(PYPROJECT)
    (root / "backend.py").write_text(BACKEND)
    (root / "constraints.txt").write_text("nothing==1.0\n")
    return root


def run(root: Path, *command: str, **environ: str) -> subprocess.CompletedProcess[str]:
    command = (str(root / "scripts/run"), *command)
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **environ}, timeout=120)


@pytest.fixture
def bare_path(tmp_path):
    """A PATH that holds what the scripts need, and no Python."""
    folder = tmp_path / "tools"
    folder.mkdir()
    for tool in ("bash", "env", "dirname", "cat", "sha256sum", "readlink"):
        (folder / tool).symlink_to(shutil.which(tool))
    return folder


def fake_python(folder: Path, name: str, version: str, new_enough: bool, has_venv: bool) -> None:
    script = folder / name
    script.write_text(
        "#!/usr/bin/env bash\ncase $2 in\n"
        f"*print*) echo {version};;\n*version_info*) exit {0 if new_enough else 1};;\n"
        f"*ensurepip*) exit {0 if has_venv else 1};;\nesac\n"
    )
    script.chmod(0o755)


def test_too_old_a_python_is_named(project, bare_path):
    fake_python(bare_path, "python3", "3.8.10", False, True)
    fake_python(bare_path, "python3.11", "3.10.2", False, True)
    done = run(project, "--version", PATH=str(bare_path), MEGALAUNCH_PYTHON="")
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.startswith(
        "megalaunch: needs Python 3.11 or newer, and found python3 is 3.8.10, python3.11 is 3.10.2; install one"
    )
    assert done.stderr.count("\n") == 1
    assert "MEGALAUNCH_PYTHON=" in done.stderr


def test_no_python_at_all(project, bare_path):
    done = run(project, PATH=str(bare_path), MEGALAUNCH_PYTHON="")
    assert done.returncode == 1
    assert "and found no python3; install one" in done.stderr


def test_a_python_without_venv_is_named_with_its_package(project, bare_path):
    fake_python(bare_path, "python3", "3.12.4", True, False)
    done = run(project, PATH=str(bare_path), MEGALAUNCH_PYTHON="")
    assert done.returncode == 1
    assert "python3 is Python 3.12.4 without the modules venv and ensurepip" in done.stderr
    assert "apt install python3.12-venv" in done.stderr


@pytest.mark.slow
def test_first_use_and_change(project):
    first = run(project, "one", "two words")
    assert (first.returncode, first.stdout) == (0, "stand-in one two words\n")
    assert "making .venv with Python 3." in first.stderr
    assert "installing megalaunch[train,serve] with pip" in first.stderr

    second = run(project, "--json")
    assert (second.stdout, second.stderr) == ("stand-in --json\n", "")  # in place: nothing of ours is printed

    for name in ("constraints.txt", "pyproject.toml"):
        (project / name).write_text((project / name).read_text() + "# changed\n")
        changed = run(project)
        assert "installing megalaunch[train,serve]" in changed.stderr
        assert "making .venv" not in changed.stderr  # brought up to date, not thrown away
        assert run(project).stderr == ""

    (project / ".venv/bin/python").unlink()  # as after an upgrade of the system's Python
    (project / ".venv/bin/python").symlink_to("/no/such/python")
    again = run(project)
    assert (again.returncode, again.stdout) == (0, "stand-in\n")
    assert "the Python of .venv is gone; starting afresh" in again.stderr


@pytest.mark.slow
def test_an_interrupted_set_up_starts_afresh_and_two_at_once_share_one(project):
    command = [str(project / "scripts/run"), "x"]
    environ = {**os.environ, "SLOW_BUILD": "60"}
    victim = subprocess.Popen(command, env=environ, stderr=subprocess.PIPE, text=True, start_new_session=True)
    assert victim.stderr is not None
    for line in victim.stderr:
        if "installing" in line:
            break
    time.sleep(1.0)  # pip is at work
    os.killpg(victim.pid, signal.SIGKILL)
    victim.wait()
    assert (project / ".venv/unfinished").exists()

    pair = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [process.communicate(timeout=120) for process in pair]
    assert [process.returncode for process in pair] == [0, 0]
    assert [out for out, _ in outputs] == ["stand-in x\n"] * 2
    told = "".join(err for _, err in outputs)
    assert told.count("the last set-up was interrupted; starting afresh") == 1
    assert told.count("installing megalaunch") == 1
    assert told.count("another set-up of this checkout is running; waiting for it") == 1


@pytest.mark.slow
def test_no_registry_is_one_clear_line(project):
    unreachable = {"PIP_INDEX_URL": "http://127.0.0.1:9/simple", "PIP_RETRIES": "0", "PIP_FIND_LINKS": ""}
    done = run(project, NEEDS="Requires-Dist: hydra-core\n", **unreachable)
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        "megalaunch: pip cannot reach its package index; check the network or proxy, or name a mirror"
    )
    assert "set_up.log" in last
    assert run(project).returncode == 0  # and with a registry the next one goes on


@pytest.fixture(scope="module")
def set_up():
    found = importlib.util.spec_from_file_location("set_up", ROOT / "scripts/set_up.py")
    module = importlib.util.module_from_spec(found)
    found.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    ("log", "told"),
    [
        ("ERROR: Could not install packages due to an OSError: [Errno 28] No space left on device", "the disk is full"),
        (
            "WARNING: Retrying ... NewConnectionError(...)\n"
            "ERROR: Could not find a version that satisfies the requirement typer (from versions: none)\n"
            "ERROR: No matching distribution found for typer",
            "pip cannot reach its package index",
        ),
        (
            "ERROR: Could not find a version that satisfies the requirement torch==2.13.0 (from versions: 2.9.0)\n"
            "ERROR: No matching distribution found for torch==2.13.0",
            "the package index has no torch==2.13.0 for Python 3.",
        ),
        (
            "Collecting x\n  error: subprocess-exited-with-error\nmore",
            "pip failed: error: subprocess-exited-with-error",
        ),
        ("", "pip failed: no message"),
    ],
)
def test_why_pip_failed(set_up, log, told):
    assert set_up.explain(log.splitlines()).startswith(told)


def test_too_little_disk_is_said_before_anything_is_made(set_up, tmp_path, monkeypatch):
    monkeypatch.setattr(set_up.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10**10, 9 * 10**9, 10**9))
    for extras, size in (("train", r"1\.2 GB"), ("train,dev,data,parity", r"2\.9 GB")):
        with pytest.raises(set_up.SetUpError, match=rf"has 1\.0 GB free, and the environment takes {size}"):
            set_up.main(tmp_path, extras, "0")
    assert list(tmp_path.iterdir()) == []


def test_extras_of_an_earlier_set_up_stay(set_up, tmp_path, monkeypatch):
    installed = []
    monkeypatch.setattr(set_up, "make_venv", lambda venv: (venv / "unfinished").touch())
    monkeypatch.setattr(set_up, "install", lambda root, venv, extras, lock: installed.append(extras))
    (tmp_path / ".venv").mkdir()
    set_up.main(tmp_path, "train,dev", "1")
    set_up.main(tmp_path, "train", "2")
    assert installed == ["train,dev", "train,dev"]
    set_up.main(tmp_path, "train", "2")  # already done by another
    assert len(installed) == 2


def test_pip_output_is_condensed(set_up, capsys):
    for line in (
        "Collecting torch==2.13.0",
        "  Downloading torch-2.13.0-cp311.whl (190.1 MB)",
        "  Downloading typer-0.29.2.whl (56 kB)",
        "Installing collected packages: a, b, c",
    ):
        set_up.show(line)
    assert capsys.readouterr().err == (
        "megalaunch:   downloading torch-2.13.0-cp311.whl (190.1 MB)\nmegalaunch:   unpacking 3 packages\n"
    )


def test_a_silent_pip_gets_a_line_of_ours(set_up, capsys, monkeypatch):
    monkeypatch.setattr(set_up, "HEARTBEAT", 0.2)
    command = [sys.executable, "-c", "import time; time.sleep(0.7); print('done')"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert list(set_up.lines_of(process)) == ["done"]
    assert "still running after 0 s" in capsys.readouterr().err


def test_bench_lists_its_benchmarks():
    done = subprocess.run([ROOT / "scripts/bench"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "startup" in done.stderr


@pytest.fixture
def checkout(tmp_path):
    """Our scripts, four files of tests, and a .venv whose Python prints its arguments."""
    shutil.copytree(ROOT / "scripts", tmp_path / "scripts")
    (tmp_path / "tests").mkdir()
    timed = "@pytest.mark.timed"
    for name, text in {"test_a.py": "", "test_b.py": timed, "test_c.py": timed, "timed.py": "mark.timed"}.items():
        (tmp_path / "tests" / name).write_text(text)
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/usr/bin/env bash\necho "${OMP_NUM_THREADS:-} $*" | tee -a calls\n[[ $* != *"$FAILS"* ]]\n')
    python.chmod(0o755)
    made_from = f"{tmp_path}\n"
    for name in ("pyproject.toml", "constraints.txt"):
        (tmp_path / name).write_text(name)
        made_from += name
    stamp = (hashlib.sha256(made_from.encode()).hexdigest(), "train,dev,data,trackers,parity", str(python))
    (tmp_path / ".venv/stamp").write_text("\t".join(stamp) + "\n")
    return tmp_path


def called(checkout: Path, *arguments: str, fails: str = "nothing") -> tuple[list[str], str, int]:
    """What Python was called with by scripts/test."""
    environ = {key: value for key, value in os.environ.items() if key != "OMP_NUM_THREADS"} | {"FAILS": fails}
    command = [checkout / "scripts/test", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, env=environ, timeout=60)
    calls = [line.removeprefix(" ") for line in done.stdout.splitlines() if not line.startswith("==")]
    return calls, done.stderr, done.returncode


SELECTIONS = [([], "not slow and not gpu"), (["--all"], "not release and not gpu"), (["--release"], "not gpu")]


@pytest.mark.parametrize(("arguments", "selection"), SELECTIONS)
def test_three_tests_at_once_and_then_the_timed_ones(checkout, arguments, selection):
    calls, err, code = called(checkout, *arguments)
    assert [call.split()[1] for call in calls[:3]] == ["ruff", "ruff", "mypy"]
    assert f"-m pytest -m {selection} --collect-only -qq\n" in (checkout / "calls").read_text()  # while these run
    assert calls[3:] == [
        f"1 -m pytest -m {selection} and not timed -n 3 --dist worksteal --durations=30",
        f"1 -m pytest -m {selection} and timed -n 3 --dist loadfile --no-loadscope-reorder --durations=30 "
        "tests/test_c.py tests/test_b.py",
    ]
    assert (err, code) == ("", 0)


def test_those_that_follow_run_even_after_a_failure(checkout):
    calls, err, code = called(checkout, fails="not timed")
    assert len(calls) == 5
    assert err == f"failed: {calls[3].removeprefix('1 -m ')}\n"
    assert code == 1


def test_chosen_tests_run_alone_and_as_chosen(checkout):
    assert called(checkout, "tests/x.py", "-k", "y")[0] == ["-m pytest -m not slow and not gpu tests/x.py -k y"]
    assert called(checkout, "--all", "tests/x.py")[0] == ["-m pytest -m not release and not gpu tests/x.py"]
    assert called(checkout, "--gpu")[0][3:] == ["-m pytest -m gpu"]
