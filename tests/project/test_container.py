"""scripts/container reads our Dockerfile and .dockerignore as Docker does; the steps need root and minutes."""

from __future__ import annotations

import importlib.util
import json
import re
import sys

import pytest
from paths import ROOT

SPEC = importlib.util.spec_from_file_location("container", ROOT / "scripts/container.py")
container = importlib.util.module_from_spec(SPEC)
sys.modules["container"] = container  # dataclasses look their module up
SPEC.loader.exec_module(container)
DOCKERFILE = (ROOT / "Dockerfile").read_text()
IGNORED = container.ignored_names(ROOT, (ROOT / ".dockerignore").read_text())


@pytest.fixture
def steps(tmp_path, monkeypatch):
    """The commands that a build would run, as user and words; the copies are real."""
    monkeypatch.setattr(container, "FOLDER", tmp_path / "stages")
    (tmp_path / "stages").mkdir()
    for folder in ("etc", "opt/megalaunch"):
        (tmp_path / "base" / folder).mkdir(parents=True)
    done = []

    def execute(self, command, folder=None, user=None):
        done.append((user or self.stages[-1].user, " ".join(command)))

    monkeypatch.setattr(container.Build, "execute", execute)
    return done


def build(tmp_path, text=DOCKERFILE, target=None, **given):
    return container.Build(tmp_path / "base", given, container.Host((), ()), target).run(text)


def test_every_step_of_the_dockerfile_is_known(tmp_path, steps):
    stage = build(tmp_path, TORCH_INDEX="https://example.org/cpu")
    assert len(steps) == DOCKERFILE.count("\nRUN ") - 2  # those of the stage that it does not need
    assert (stage.user, stage.folder) == ("megalaunch", "/workspace")
    assert stage.entrypoint == ["megalaunch"]
    assert stage.health[0] == "megalaunch"
    assert stage.environment["PATH"].startswith("/opt/megalaunch/bin:/usr/local/sbin:")
    sources = tmp_path / "stages/build/src"
    assert (sources / "megalaunch/cli/app.py").is_file()
    assert (sources / "megalaunch/recipes").is_symlink()
    assert (sources / "recipes/quickstart.yaml").is_file()
    assert not list(sources.rglob("__pycache__"))


def test_the_development_stage_ends_the_build(tmp_path, steps):
    assert build(tmp_path, target="development").user == "developer"
    settings = json.loads((ROOT / ".devcontainer/devcontainer.json").read_text())
    assert (settings["build"]["target"], settings["remoteUser"]) == ("development", "developer")
    assert set(settings["build"]["args"]) <= set(re.findall(r"^ARG (\w+)", DOCKERFILE, re.MULTILINE))
    with pytest.raises(container.BuildError, match="has no stage nothing"):
        build(tmp_path, target="nothing")


def test_what_the_script_does_not_know_is_refused(tmp_path, steps):
    for text, expected in (
        ("FROM x\nSHELL /bin/bash\n", "SHELL is not known"),
        ("FROM x\nRUN --mount=type=cache true\n", "RUN takes a shell command"),
        ("FROM x\nENV A=${B:-c}\n", "only"),
        ("FROM x\nCOPY CHANGELOG.md /\n", "dockerignore excludes it"),
        ("FROM x\nCOPY tests /tests\n", "dockerignore excludes it"),
        ("FROM x\nCOPY --chown=1 README.md /\n", "takes only --from"),
    ):
        with pytest.raises(container.BuildError, match=expected):
            build(tmp_path, text)


@pytest.mark.parametrize(
    ("path", "admitted"),
    [
        ("pyproject.toml", True),
        ("megalaunch/cli/app.py", True),
        ("megalaunch/cli/__pycache__", False),
        ("docs/reference/rules.md", True),
        ("docs/index.md", False),
        ("runs", False),
        (".git", False),
        (".venv", False),
        ("tests", False),
        (".env", False),
    ],
)
def test_only_sources_reach_the_image(path, admitted):
    folder, _, name = path.rpartition("/")
    assert (name not in IGNORED(str(ROOT / folder), [name])) is admitted


def test_the_user_of_the_image_has_no_rights_and_nothing_is_unpinned():
    assert DOCKERFILE.rindex("\nUSER megalaunch") > DOCKERFILE.rindex("\nRUN ")
    assert ":latest" not in DOCKERFILE
    assert all("--constraint /src/constraints.txt" in line for line in DOCKERFILE.splitlines() if "pip install" in line)
