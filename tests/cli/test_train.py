"""`megalaunch train`: what it refuses before anything starts, what a dry run shows, and one whole tiny run."""

from __future__ import annotations

import importlib.util
import json
import os
import shlex
import signal
import time

import pytest
import typer
from launching import events_of, steps_of, wait_until
from made_specs import composed, resolved
from paths import ROOT
from slow_cases import slow_but
from training import tiny_overrides, train_tiny
from typer.testing import CliRunner

from megalaunch.cli.app import app
from megalaunch.engine.api import deep_plan
from megalaunch.engine.process_group import local_device
from megalaunch.launch.directory import lock_run, run_is_locked
from megalaunch.launch.lock import read_holder
from megalaunch.platform.packages import NVRX_MODULE
from megalaunch.rundir.outcome import read_outcome
from megalaunch.rundir.paths import RunDirectory
from megalaunch.runs.required_packages import require_optional_packages
from megalaunch.schema import with_values
from megalaunch.schema.spec_file import read_spec


def invoke(*arguments: str):
    return CliRunner().invoke(app, ["train", *arguments])


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_torch_it_names_the_extra(folder, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "torch" else real(name))
    result = invoke(*tiny_overrides(folder))
    assert result.exit_code == 2
    assert "training needs torch" in result.stderr
    assert "pip install 'megalaunch[train]'" in result.stderr
    assert invoke("--dry-run", *tiny_overrides(folder)).exit_code == 0


def test_without_deep_ep_it_says_how_to_install_it(capsys):
    spec = composed("recipe=mixtral_tiny", "data.corpus=x").spec
    require_optional_packages(spec)
    with pytest.raises(typer.Exit) as refused:
        require_optional_packages(with_values(spec, {"parallel.moe_token_dispatcher_type": "flex"}))
    assert refused.value.exit_code == 2
    said = capsys.readouterr().err
    assert "moe_token_dispatcher_type=flex needs DeepEP (deep_ep), which is not installed" in said
    assert "pip install --no-build-isolation git+https://github.com/deepseek-ai/DeepEP" in said
    assert "parallel.moe_token_dispatcher_type=alltoall" in said


def test_experts_over_ranks_need_a_torch_that_can_shard_them(capsys, monkeypatch):
    spec, _ = resolved("recipe=mixtral_tiny", "data.corpus=x", "parallel.ep=2", "cluster.devices_per_node=2")
    alone = with_values(spec, {"parallel.ep": 1})
    require_optional_packages(spec)
    monkeypatch.setattr("megalaunch.platform.packages.installed_version", lambda name: "2.11.0+cu130")
    require_optional_packages(alone)
    with pytest.raises(typer.Exit) as refused:
        require_optional_packages(spec)
    assert refused.value.exit_code == 2
    said = capsys.readouterr().err
    assert "experts with tp, ep or etp need torch 2.12 or newer, found 2.11.0+cu130" in said
    assert "pip install 'torch>=2.12'" in said
    _, problem = local_device(spec)
    assert problem is not None
    assert "need torch 2.12 or newer" in problem.reason
    with pytest.raises(ValueError, match=r"need torch 2\.12 or newer"):
        deep_plan(spec)


def test_without_transformer_engine_it_says_how_to_install_it(capsys):
    spec = composed("recipe=tiny", "data.corpus=x", "precision=fp8").spec
    require_optional_packages(spec)
    with pytest.raises(typer.Exit) as refused:
        require_optional_packages(with_values(spec, {"precision.fp8.implementation": "transformer_engine"}))
    assert refused.value.exit_code == 2
    said = capsys.readouterr().err
    page = (ROOT / "docs/precision.md").read_text(encoding="utf-8")
    assert said in page, "docs/precision.md shows another message"
    assert "pip install 'megalaunch[te]'" in said


@pytest.mark.parametrize(
    ("backend", "install"),
    [("flash_attn", "pip install --no-build-isolation 'flash-attn>=2.6'"), ("te", "pip install 'megalaunch[te]'")],
)
def test_without_a_package_of_attention_it_says_how_to_install_it(backend, install, capsys):
    spec = composed("recipe=tiny", "data.corpus=x").spec
    with pytest.raises(typer.Exit) as refused:
        require_optional_packages(with_values(spec, {"model.attention_backend": backend}))
    assert refused.value.exit_code == 2
    said = capsys.readouterr().err
    assert f"model.attention_backend={backend} needs the package " in said
    assert f"fix:  {install}\n      or model.attention_backend=auto\n" in said
    _, problem = local_device(with_values(spec, {"model.attention_backend": backend, "platform.chip": "cpu"}))
    assert problem is not None
    assert problem.reason.endswith(f"lacks: {install}")


def test_without_nvrx_it_says_how_to_install_it(capsys, monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == NVRX_MODULE else real(name))
    spec = composed("recipe=tiny", "data.corpus=x").spec
    require_optional_packages(spec)
    monitored = with_values(spec, {"launcher.enable_ft_package": True, "platform.chip": "cpu"})
    with pytest.raises(typer.Exit) as refused:
        require_optional_packages(monitored)
    assert refused.value.exit_code == 2
    said = capsys.readouterr().err
    assert "enable_ft_package needs NVRx (nvidia-resiliency-ext), which is not installed" in said
    assert "fix:  pip install 'megalaunch[nvrx]'\n      or launcher.enable_ft_package=false\n" in said
    _, problem = local_device(monitored)
    assert problem is not None
    assert problem.reason.endswith("lacks: pip install 'megalaunch[nvrx]'")


def test_a_dry_run_prints_the_command_and_leaves_nothing(folder):
    result = invoke("--dry-run", *tiny_overrides(folder))
    assert result.exit_code == 0, result.output
    (command,) = [line for line in result.stdout.splitlines() if "megalaunch.engine.agent" in line]
    argv = shlex.split(command)
    assert argv[1:3] == ["-m", "megalaunch.engine.agent"]
    assert argv[-3:] == ["-m", "megalaunch.engine.worker", str(folder / "run" / "spec.yaml")]
    assert "39,072 parameters" in result.stdout
    assert sorted(path.name for path in folder.iterdir()) == ["corpus"]


def test_a_dry_run_shows_the_command_of_each_machine(folder):
    result = invoke("--dry-run", *tiny_overrides(folder, "cluster.nodes=2"))
    assert result.exit_code == 0, result.output
    commands = [shlex.split(line) for line in result.stdout.splitlines() if "megalaunch.engine.agent" in line]
    assert [command[3:5] for command in commands] == [["--fork", f"--node-rank={node}"] for node in range(2)]
    assert all(command[5] == "--first-node=NODE0:29400" for command in commands)


def test_several_machines_are_refused_by_name_with_their_commands(folder):
    result = invoke(*tiny_overrides(folder, "cluster.nodes=2"))
    assert result.exit_code == 2
    assert "[launcher.multi_node]" in result.stderr
    assert "fix:  cluster.nodes=1" in result.stderr
    assert result.stderr.count("-m megalaunch.engine.agent") == 2
    assert not (folder / "run").exists()


IMPOSSIBLE = [
    (["train.stepz=3"], "did you mean"),
    (["+experiment=big"], "unknown key"),
    (
        ["precision.fp8.implementation=transformer_engine", "precision.compute_dtype=fp8"],
        "[fp8.library_chip]",
    ),
    (["batch.global_batch_size=7"], "batch.global_batch_size"),
    (["run.resume=required"], "run.resume=required"),
    (["model.vocab_size=300"], "vocab_size 300 is below the 320 tokens"),
]


@pytest.mark.parametrize(
    ("overrides", "said"),
    slow_but(IMPOSSIBLE, *IMPOSSIBLE[::3]),
)
def test_overrides_that_cannot_run(folder, overrides, said):
    result = invoke(*tiny_overrides(folder, *overrides))
    assert result.exit_code == 2
    assert said in result.stderr
    assert not (folder / "run").exists()


def test_bad_data_has_its_own_exit_code_and_leaves_nothing(folder):
    result = invoke(*tiny_overrides(folder, "data.corpus=nowhere"))
    assert result.exit_code == 3
    assert "nowhere" in result.stderr
    assert not (folder / "run").exists()


def test_a_foreign_directory(folder):
    overrides = tiny_overrides(folder)
    (folder / "run").mkdir()
    (folder / "run" / "letters.doc").write_text("")
    result = invoke(*overrides)
    assert result.exit_code == 2
    assert "is not a run directory: it contains letters.doc" in result.stderr
    assert [path.name for path in (folder / "run").iterdir()] == ["letters.doc"]


def test_a_directory_that_cannot_be_made(folder):
    result = invoke(*tiny_overrides(folder, "run.directory=/proc/run"))
    assert result.exit_code == 2
    assert "/proc/run is not writable" in result.stderr


def test_a_held_directory_names_its_holder_within_a_second(folder):
    directory = RunDirectory(folder / "run")
    lock = lock_run(directory)
    try:
        began = time.monotonic()
        result = invoke(*tiny_overrides(folder))
        assert time.monotonic() - began < 2  # a loaded test machine; 0.5 s when idle
    finally:
        lock.release()
    assert result.exit_code == 2
    assert f"is in use by process {os.getpid()} on " in result.stderr


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_while_the_data_is_prepared(folder, monkeypatch, number, code):
    import megalaunch.data.prepare

    def interrupted(data, tokenizer, report):
        os.kill(os.getpid(), number)
        time.sleep(5)

    monkeypatch.setattr(megalaunch.data.prepare, "prepare", interrupted)
    before = signal.getsignal(number)
    result = invoke(*tiny_overrides(folder))
    assert result.exit_code == code
    assert "stopped before the workers started" in result.stderr
    assert not (folder / "run").exists()
    assert signal.getsignal(number) is before


def test_preparing_only(folder):
    result = invoke("--prepare-only", *tiny_overrides(folder, "cluster.nodes=2"))
    assert result.exit_code == 0, result.output
    spec = read_spec(folder / "run" / "spec.yaml")
    assert spec.data.train_prefix.startswith(str(folder / "cache"))
    assert spec.tokenizer.path.endswith("tokenizer.json")
    assert spec.model.vocab_size <= 320
    assert result.stdout.count("-m megalaunch.engine.agent") == 2
    assert "does not exist" not in result.stdout
    secret = folder / "run" / "rendezvous.json"
    assert secret.stat().st_mode & 0o777 == 0o600
    assert not any(part in result.stdout for part in json.loads(secret.read_text()).values())


def test_a_detached_run_continues_until_it_is_stopped(folder):
    run = RunDirectory(folder / "run")
    code, out, err = train_tiny(folder, "train.steps=3000", "--detach")
    assert (code, err) == (0, "")
    holder = read_holder(run.lock).pid
    continues, what_next = out.splitlines()[-2:]
    assert continues == f"the run continues in process {holder}; output in run/logs/command.log"
    assert what_next == "next: megalaunch watch run, logs or stop"
    wait_until(lambda: len(steps_of(run)) > 3, 60)
    assert train_tiny(folder, "train.steps=3000", "--detach")[0] == 2  # the directory is in use
    assert CliRunner().invoke(app, ["stop", str(run.root)]).exit_code == 0
    wait_until(lambda: not run_is_locked(run), 60)
    assert read_outcome(run.outcome).exit_code == 75
    logs = CliRunner().invoke(app, ["logs", str(run.root)]).stdout
    assert "==> run/logs/command.log <==" in logs
    assert "step    1/3000" in logs


def test_a_whole_run_then_its_report_then_its_extension(folder):
    code, out, err = train_tiny(folder)
    assert (code, err) == (0, ""), err
    directory = RunDirectory(folder / "run")
    assert steps_of(directory) == [*range(1, 11), 10, *range(11, 21), 20]
    for part in (
        "39,072 parameters",
        "starting 2 workers",
        "step 20/20  loss",
        "step 20  validation loss",
        "checkpoint of step 20 saved",
        "finished all 20 steps",
        "checkpoint       run/checkpoints/step_00000020",
        "plot             run/plots/loss.png",
        "the model wrote",
    ):
        assert part in out, part

    began = time.monotonic()
    code, out, err = train_tiny(folder)
    assert time.monotonic() - began < 10
    assert (code, err) == (0, "")
    assert "This run is finished." in out
    assert len(events_of(directory, "launch")) == 1

    code, out, err = train_tiny(folder, "optimizer.lr=1", "train.seed=3")
    assert code == 2
    assert "the run started with optimizer.lr=0.01" in err
    assert "the run started with train.seed=1234" in err

    code, out, err = train_tiny(folder, "train.steps=22", "logging.log_interval=2", "parallel.dp=1")
    assert (code, err) == (0, ""), err
    assert "schedule.decay_steps=20" in out
    assert "resuming after step 20" in out
    assert steps_of(directory)[-3:] == [21, 22, 22]
    assert read_spec(directory.spec).schedule.decay_steps == 20
    assert read_outcome(directory.outcome).step == 22
    assert len(directory.overrides.read_text().splitlines()) == 2
