"""Hydra and OmegaConf are what composes: the habits of a Hydra user, beside the checks that Hydra lacks."""

from __future__ import annotations

import pickle
import subprocess
import sys

import pytest
import yaml
from hydra import compose as hydra_compose
from hydra import initialize, initialize_config_dir
from hydra.core.global_hydra import GlobalHydra
from omegaconf import OmegaConf
from slow_cases import slow_but

from megalaunch.config.compose import Composer, compose
from megalaunch.config.errors import ConfigError
from megalaunch.config.groups import CONF
from megalaunch.config.hydra import api
from megalaunch.config.keys import SECTIONS, schema_keys
from megalaunch.config.parallel_names import layout_values
from megalaunch.config.recipes import PACKAGED
from megalaunch.schema import RunSpec, build_run_spec

LLAMA = "recipe=llama3_8b"
DEFAULT_INTERVAL = schema_keys()["train.validation_interval"].field.default


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name, text in {
        "conf/model/mine.yaml": "name: llama\nnum_layers: 3\nhidden_size: 64\nffn_hidden_size: 128\n"
        "num_attention_heads: 4\n",
        "conf/experiment/short.yaml": "# @package _global_\ndefaults:\n  - override /parallel: tp2\n  - _self_\n"
        "train: {steps: 7}\noptimizer: {lr: 2e-4}\n",
        "conf/experiment/bare.yaml": "train: {steps: 7}\n",
        "conf/experiment/circle.yaml": "# @package _global_\ndefaults:\n  - circle\n",
        "conf/seeds/two.yaml": "seed: 2\n",
        "shared/schedule/team.yaml": "shape: linear\n",
    }.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    return tmp_path


def spec(*overrides: str) -> RunSpec:
    return compose([LLAMA, *overrides]).spec


def problems(*overrides: str) -> dict[str, str]:
    with pytest.raises(ConfigError) as caught:
        compose([LLAMA, *overrides])
    return {problem.path: problem.message for problem in caught.value.problems}


def test_hydra_composes(monkeypatch):
    """Whatever Hydra returns is the spec: nothing is merged beside it."""
    real = api.hydra.compose

    def altered(*args, **options):
        config = real(*args, **options)
        config.train.steps = 4321
        return config

    monkeypatch.setattr(api.hydra, "compose", altered)
    assert compose([LLAMA]).spec.train.steps == 4321
    assert compose([LLAMA, "train.steps=5"]).spec.train.steps == 5


@pytest.mark.parametrize(("further", "are_read"), [([], False), (["hydra.verbose=true"], True), (["~recompute"], True)])
def test_groups_of_hydra_s_own_node_are_read_only_where_an_override_may_reach_them(monkeypatch, further, are_read):
    nodes, real = [], api.compose_config

    def seen(*args):
        nodes.append(real(*args))
        return nodes[-1]

    monkeypatch.setattr("megalaunch.config.compose.compose_config", seen)
    compose([LLAMA, *further])
    read = {group for group, option in nodes[0].hydra.runtime.choices.items() if option}
    assert [f"hydra/{group}" in read for group in api._OWN_GROUPS] == [are_read] * len(api._OWN_GROUPS)


def test_typed_values_are_gone_with_their_context():
    """The same composition of files serves every list of typed values."""
    from megalaunch.config.hydra.structured import structured_run_spec

    composed = api.Composed(OmegaConf.structured(structured_run_spec()), OmegaConf.create())
    before = OmegaConf.to_container(composed.config)
    typed = {"train.steps": 7, "model.rope": {"theta": 1e4}, "parallel.tp": "${train.steps}"}
    with composed.with_values(typed) as config:
        assert (config.train.steps, config.model.rope.theta, config.parallel.tp) == (7, 1e4, 7)
    assert OmegaConf.to_container(composed.config) == before


def test_the_schema_is_a_structured_config():
    from omegaconf.errors import ValidationError

    from megalaunch.config.hydra.structured import structured_run_spec

    config = OmegaConf.structured(structured_run_spec())
    with pytest.raises(ValidationError):
        config.train.steps = "many"
    with pytest.raises(Exception, match="stepz"):
        config.train.stepz = 3


def test_a_pickled_config_leaves_the_schema_alone():
    """A launcher plug-in of Hydra sends configs to its workers and back; by cloudpickle, as joblib does."""
    cloudpickle = pytest.importorskip("cloudpickle")
    from megalaunch.config.hydra.structured import structured_run_spec

    config = OmegaConf.structured(structured_run_spec())
    assert b"_MISSING_TYPE" not in cloudpickle.dumps(config)
    assert pickle.loads(cloudpickle.dumps(config)) == config
    assert OmegaConf.structured(structured_run_spec()) == config


GRAMMAR = [
    (["+train.steps=3"], "train.steps", 3),
    (["++train.steps=3"], "train.steps", 3),
    (["~train.validation_interval"], "train.validation_interval", DEFAULT_INTERVAL),
    (["~schedule"], "schedule.warmup_fraction", 0.0333),  # the recipe's own value stays
    (["~schedule", "~schedule.warmup_fraction"], "schedule.warmup_fraction", 0.0),
    (["train.steps=${train.validation_interval}"], "train.steps", 500),
    (["train.steps=${mg.mul:${train.validation_interval},3}"], "train.steps", 1500),
    (["train.steps=${mg.div:${train.validation_interval},4}"], "train.steps", 125),
    (["train.steps=${oc.select:train.none,11}"], "train.steps", 11),
    (["run.name='a, b'"], "run.name", "a, b"),
    (["run.name=llama_${parallel.cp}"], "run.name", "llama_2"),
    (["recompute.granularity=selective", "recompute.modules=[mlp,norm]"], "recompute.modules", ("mlp", "norm")),
    (["model.rope={theta: 1e4, scaling: none}"], "model.rope.theta", 1e4),
    (["parallel=tp4pp4", "parallel.tp=2"], "parallel.tp", 2),
    (["parallel.tp=2", "parallel=tp4pp4"], "parallel.pp", 4),
]


@pytest.mark.parametrize(
    ("overrides", "path", "value"),
    slow_but(GRAMMAR, *GRAMMAR[::3]),
)
def test_override_grammar(overrides, path, value):
    section, _, name = path.rpartition(".")
    found = spec(*overrides)
    for part in section.split("."):
        found = getattr(found, part)
    assert getattr(found, name) == value


def test_own_groups_options_and_folders(folder):
    assert spec("model=mine").model.num_layers == 3
    found = compose([LLAMA, "+experiment=short"])
    assert (found.spec.train.steps, found.spec.parallel.tp, found.spec.optimizer.lr) == (7, 2, 2e-4)
    assert found.origins["train.steps"].where == "experiment=short, conf/experiment/short.yaml:5:9"
    assert found.choices["experiment"] == "short"
    assert spec("+experiment=short", "train.steps=9", "parallel=pp2").parallel.pp == 2
    assert spec("+seeds@train=two").train.seed == 2
    assert spec("schedule=team", "hydra.searchpath=[file://shared]").schedule.shape == "linear"


def test_own_groups_that_do_not_fit(folder):
    assert "add it: +experiment=short" in problems("experiment=short")["experiment"]
    assert "has no option 'shrt'; did you mean 'short'?" in problems("+experiment=shrt")["experiment"]
    assert "unknown key" in problems("+experiment=bare")["experiment.train"]
    assert "is no folder" in problems("hydra.searchpath=[nowhere]")["hydra.searchpath"]
    assert "must be a list" in problems("hydra.searchpath=shared")["hydra.searchpath"]
    assert "include each other" in problems("+experiment=circle")["defaults"]
    assert "unknown key" in " ".join(problems("+seeds=two").values())


NO_GROUPS = ["../conf/experiment", "/etc", "x" * 5000, "a b", "experiment/../seeds"]


@pytest.mark.parametrize("group", slow_but(NO_GROUPS, NO_GROUPS[0], NO_GROUPS[3]))
def test_a_name_that_is_no_config_group_reads_no_folder(folder, group):
    assert any("unknown key" in message for message in problems(f"+{group}=short").values())


def test_an_application_that_uses_hydra_keeps_its_own():
    with initialize(config_path=None, version_base="1.3"):
        outer = GlobalHydra.instance().hydra
        assert spec("train.steps=3").train.steps == 3
        assert GlobalHydra.instance().hydra is outer
        assert hydra_compose(overrides=["+a=1"]).a == 1
    assert not GlobalHydra.instance().is_initialized()


def test_a_common_ancestor_counts_once_and_the_later_parent_wins(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipes").mkdir()
    for name, defaults, body in (
        ("ground", "  - override /model: tiny\n  - override /schedule: wsd\n",
         "batch: {sequence_length: 8}\ntrain: {steps: 5}\n"),
        ("left", "  - ground\n  - override /schedule: linear\n",
         "train: {steps: 6, seed: 1}\nmodel: {rope: {theta: 5.0}}\n"),
        ("right", "  - ground\n  - override /parallel: tp2\n", "train: {seed: 2}\nbatch: {global_batch_size: 4}\n"),
        ("top", "  - left\n  - right\n  - override /recompute: selective\n", "recompute: {modules: [mlp]}\n"),
    ):  # fmt: skip
        text = f"# @package _global_\n# made\ndefaults:\n{defaults}  - _self_\n{body}"
        (tmp_path / "recipes" / f"{name}.yaml").write_text(text)
    found = compose(["recipe=top"]).spec
    assert (found.train.steps, found.train.seed, found.schedule.shape, found.parallel.tp) == (6, 2, "linear", 2)
    assert found.recompute.modules == ("mlp",)


@pytest.mark.parametrize("quarter", slow_but(range(4), every=[0]))
def test_hydra_alone_composes_the_shipped_files_alike(tmp_path, quarter):
    """conf/ and recipes/ as they are, read by Hydra's own file sources; only layout names need files."""
    composer = Composer()
    names = sorted(path.stem for path in PACKAGED.glob("*.yaml"))[quarter::4]
    ours = {name: composer.compose([f"recipe={name}"]) for name in names}
    (tmp_path / "recipe").symlink_to(PACKAGED)
    (tmp_path / "parallel").mkdir()
    for layout in {found.choices["parallel"] for found in ours.values()}:
        if not (CONF / "parallel" / f"{layout}.yaml").exists():
            (tmp_path / "parallel" / f"{layout}.yaml").write_text(yaml.safe_dump(layout_values(layout)))
    with initialize_config_dir(str(CONF), version_base="1.3"):
        for name, found in ours.items():
            config = hydra_compose("config", [f"hydra.searchpath=[file://{tmp_path}]", f"recipe={name}"])
            data = OmegaConf.to_container(config)
            assert isinstance(data, dict)
            assert build_run_spec({section: data[section] for section in SECTIONS}) == found.spec, name


def test_only_composition_imports_hydra():
    code = (
        "import sys, megalaunch.cli.app, megalaunch.plan.check, megalaunch.launch.local\n"
        "sys.exit(any(name in sys.modules for name in ('hydra', 'omegaconf')))"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
