"""The house keeps its rules: arrows, floors, torch-free wing, no circles, safety, sizes."""

from __future__ import annotations

import ast
import json
import subprocess
import sys
from functools import cache
from pathlib import Path

import architecture_rules as rules
import pytest
from paths import ROOT

TREE_RULES = (
    rules.wrong_arrows,
    rules.wrong_floors,
    rules.foreign_imports,
    rules.circles,
    rules.bare_to_local,
    rules.device_branches,
    rules.device_names,
    rules.grab_bags,
)


@pytest.fixture(scope="module")
def ours():
    return rules.Tree(ROOT)


def sources(*folders: str):
    """Every Python file below the folders, as (path, text, tree)."""
    for folder in folders:
        for path in sorted((ROOT / folder).rglob("*.py")):
            yield str(path.relative_to(ROOT)), *parsed(path)


@cache
def parsed(path: Path) -> tuple[str, ast.Module]:
    """Several rules read a file; parsing it takes longer than they do."""
    text = path.read_text(encoding="utf-8")
    return text, ast.parse(text)


def test_the_tree_is_whole(ours):
    assert {"cli.app", "schema", "engine.worker", "kernels", "plan.check", "launch.supervise"} <= set(ours.modules)
    known = {*(name.partition(".")[0] for name in rules.ARROWS), "", "conf", "recipes"}
    assert {module.room for module in ours.modules.values()} <= known  # a new room needs its arrows


@pytest.mark.parametrize("rule", TREE_RULES, ids=lambda rule: rule.__name__)
def test_tree_rule(ours, rule):
    assert list(rule(ours)) == []


def test_nothing_unsafe():
    assert [
        line for path, _, tree in sources("megalaunch", "kernels", "scripts") for line in rules.unsafe_code(path, tree)
    ] == []


def test_files_of_a_run_are_written_through_no_link():
    folders = ("megalaunch/rundir", "megalaunch/launch", "megalaunch/engine")
    assert [line for path, _, tree in sources(*folders) for line in rules.unguarded_writes(path, tree)] == []


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("path.write_text('')", 1),
        ("f(x).write_bytes(b'')", 1),
        ("os.open(path, os.O_WRONLY | os.O_CREAT, 0o644)", 1),
        ("os.open(path, os.O_RDONLY)", 0),
        ("log.open('ab')", 1),
        ("directory.metrics.open('w', encoding='utf-8')", 1),
        ("open(path, 'a')", 1),
        ("path.open('rb')", 0),
        ("path.open()", 0),
        ("open_file(path, os.O_WRONLY | os.O_CREAT)", 0),
    ],
)
def test_unguarded_writes_are_found(line, faults):
    assert len(list(rules.unguarded_writes("megalaunch/launch/x.py", ast.parse(line)))) == faults


def test_private_names_of_torch_are_in_one_file():
    assert [line for path, _, tree in sources("megalaunch/engine") for line in rules.private_names(path, tree)] == []


@pytest.mark.parametrize(
    ("line", "faults"),
    [
        ("from torch.utils._pytree import tree_leaves", 1),
        ("from torch.distributed.pipelining.schedules import _Action", 1),
        ("import torch._dynamo", 1),
        ("group._reduce_dtype = dtype", 1),
        ("super()._recv_meta(source)", 1),
        ("from __future__ import annotations", 0),
        ("self._saved = saved", 0),
        ("def _own(): pass\nx._own()", 0),
        ("os._exit(1)", 0),
    ],
)
def test_private_names_are_found(line, faults):
    assert len(list(rules.private_names("megalaunch/engine/x.py", ast.parse(line)))) == faults


def test_nothing_unfinished():
    folders = ("megalaunch", "kernels", "scripts", "tests")
    assert [line for path, text, _ in sources(*folders) for line in rules.unfinished_words(path, text)] == []


def test_sizes():
    folders = ("megalaunch", "kernels", "scripts", "tests")
    assert [line for path, text, tree in sources(*folders) for line in rules.too_long(path, text, tree)] == []


@pytest.mark.parametrize("arguments", [["--help"], ["validate-config", "recipe=quickstart"], ["recipes", "list"]])
def test_torch_stays_out_of_these_commands(arguments):
    code = (
        "import json, sys\n"
        f"sys.argv = ['megalaunch', *{arguments!r}]\n"
        "from megalaunch.cli.main import main\n"
        "try:\n    main()\n"
        "except SystemExit as end:\n    code = end.code\n"
        "kept_out = {'torch', 'safetensors', 'matplotlib', 'pandas', 'megalaunch.importers'}\n"
        "print(json.dumps([code, sorted(set(sys.modules) & kept_out)]))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert json.loads(done.stdout.splitlines()[-1]) == [0, []], done.stderr


# Below: each rule finds its fault in a made-up tree, and lets the right form pass.


@pytest.fixture
def made_up(tmp_path):
    def make(files: dict[str, str]) -> rules.Tree:
        for name, text in files.items():
            path = tmp_path / "megalaunch" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return rules.Tree(tmp_path)

    return make


def test_no_arrow_of_the_house_goes_up():
    """The rooms stand on floors: a room is removed when all that it may import is removed."""
    below = {room.partition(".")[0]: set() for room in rules.ARROWS}
    for room, others in rules.ARROWS.items():
        below[room.partition(".")[0]] |= {other.partition(".")[0] for other in others}
    while grounded := {room for room, others in below.items() if not others}:
        below = {room: others - grounded for room, others in below.items() if room not in grounded}
    assert below == {}


NEIGHBOURS = {
    f"{name}.py": ""
    for name in (
        "schema/__init__", "schema/spec_file", "config/compose", "plan/check", "platform/chips",
        "data/tokenizer/tokenizer", "data/preprocess/pipeline", "data/samples/sample",
        "launch/local", "cli/train/train", "runs/prepare_run", "engine/api", "engine/worker", "engine/mesh",
        "engine/param_layout", "engine/model/decoder", "engine/train/trainer", "engine/checkpoint/store",
        "engine/inference/jobs", "rundir/paths", "kernels/__init__",
        "importers/huggingface/folder", "importers/megatron/spelling", "runs/import_megatron/importer",
    )
}  # fmt: skip


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("plan/x.py", "from megalaunch.schema import RunSpec", None),
        ("plan/x.py", "from megalaunch.config import compose", "plan may not import config.compose"),
        ("plan/x.py", "from megalaunch.launch import local", "plan may not import launch.local"),
        ("plan/x.py", "from ..launch import local", "plan may not import launch.local"),
        ("plan/x.py", "import megalaunch.cli.train.train", "plan may not import cli.train.train"),
        ("plan/x.py", "def f():\n    from megalaunch.rundir import paths", "plan may not import rundir.paths"),
        ("data/tokenizer/x.py", "from megalaunch.plan.check import check", "data may not import plan.check"),
        ("rundir/x.py", "from megalaunch.schema import RunSpec", "rundir may not import schema"),
        ("config/x.py", "from megalaunch.platform.chips import CHIPS", "config may not import platform.chips"),
        ("config/x.py", "from megalaunch.importers.huggingface.folder import read", None),
        ("config/x.py", "from megalaunch.importers.megatron.spelling import translate", None),
        (
            "config/x.py", "from megalaunch.runs.import_megatron.importer import read",
            "config may not import runs.import_megatron.importer",
        ),
        ("schema/x.py", "from megalaunch.config.compose import compose", "schema may not import config.compose"),
        ("engine/x.py", "from megalaunch.importers.huggingface.folder import read", None),
        ("runs/import_megatron/importer.py", "from megalaunch.config.compose import compose", None),
        (
            "importers/megatron/x.py", "from megalaunch.config.compose import compose",
            "importers may not import config.compose",
        ),
        (
            "importers/huggingface/x.py", "from megalaunch.config.compose import compose",
            "importers may not import config.compose",
        ),
        ("importers/megatron/x.py", "from megalaunch.engine.mesh import Mesh", "importers may not import engine.mesh"),
        (
            "importers/huggingface/x.py", "from megalaunch.plan.check import check",
            "importers may not import plan.check",
        ),
        ("launch/x.py", "from megalaunch.rundir.paths import RunDirectory", None),
        ("launch/x.py", "from megalaunch.engine import api", "launch may not import engine.api"),
        ("engine/x.py", "from megalaunch.schema.spec_file import read_spec", None),
        ("engine/x.py", "from megalaunch.launch.local import run", "engine may not import launch.local"),
        ("engine/x.py", "from megalaunch.config.compose import compose", "engine may not import config.compose"),
        ("kernels/x.py", "from megalaunch.platform import chips", None),
        ("kernels/x.py", "from megalaunch.engine.model import decoder", "kernels may not import engine.model.decoder"),
        ("cli/x.py", "def f():\n    from megalaunch.engine.api import generate", None),
        ("cli/x.py", "from megalaunch.engine.api import generate", "engine.api only inside a command's body"),
        ("cli/x.py", "def f():\n    import megalaunch.engine.worker", "cli may not import engine.worker"),
        ("cli/x.py", "from megalaunch.runs import prepare_run", None),
        ("runs/x.py", "from megalaunch.launch import local", None),
        ("runs/x.py", "def f():\n    from megalaunch.engine.api import generate", None),
        ("runs/x.py", "from megalaunch.engine.api import generate", "engine.api only inside a command's body"),
        ("runs/x.py", "def f():\n    from megalaunch.cli.train import train", "runs may not import cli.train.train"),
        ("launch/x.py", "from megalaunch.runs import prepare_run", "launch may not import runs.prepare_run"),
        ("cli/x.py", "import_module('megalaunch.engine.worker')", "cli may not import engine.worker"),
        ("newroom/x.py", "from megalaunch.plan import check", "newroom may not import plan.check"),
        ("__init__.py", "from megalaunch.plan import check", "the package may not import plan.check"),
    ],
)  # fmt: skip
def test_arrows_are_checked(made_up, file, line, fault):
    found = list(rules.wrong_arrows(made_up({**NEIGHBOURS, file: line})))
    assert len(found) == (0 if fault is None else 1)
    assert fault is None or found[0].endswith(fault)


@pytest.mark.parametrize(
    ("file", "line", "fault"),
    [
        ("engine/train/x.py", "from megalaunch.engine.model.decoder import Decoder", None),
        ("engine/train/x.py", "from megalaunch.engine.train.trainer import train", None),
        ("engine/param_layout.py", "from megalaunch.engine.mesh import Mesh", None),
        (
            "engine/mesh.py",
            "from megalaunch.engine.param_layout import local_param",
            "engine.mesh may not import engine.param_layout",
        ),
        (
            "engine/model/x.py",
            "from megalaunch.engine.train import trainer",
            "engine.model may not import engine.train.trainer",
        ),
        (
            "engine/inference/x.py",
            "from ..train import trainer",
            "engine.inference may not import engine.train.trainer",
        ),
        ("engine/inference_worker.py", "from megalaunch.engine.worker import main", None),
        ("engine/inference/x.py", "from . import jobs", "engine.inference may not import engine.inference.jobs"),
        ("engine/train/x.py", "from megalaunch.engine.worker import main", "engine.train may not import engine.worker"),
        ("engine/misplaced.py", "", "engine.misplaced has no floor in ENGINE_FLOORS"),
        ("data/preprocess/x.py", "from megalaunch.data.tokenizer.tokenizer import Tokenizer", None),
        (
            "data/tokenizer/x.py",
            "from megalaunch.data.preprocess import pipeline",
            "data.tokenizer may not import data.preprocess.pipeline",
        ),
        (
            "data/samples/x.py",
            "def f():\n    from megalaunch.data.preprocess.pipeline import TextToTokens",
            "data.samples may not import data.preprocess.pipeline",
        ),
        ("data/misplaced.py", "", "data.misplaced has no floor in DATA_FLOORS"),
    ],
)
def test_floors_are_checked(made_up, file, line, fault):
    found = list(rules.wrong_floors(made_up({**NEIGHBOURS, file: line})))
    assert len(found) == (0 if fault is None else 1)
    assert fault is None or found[0].endswith(fault)


@pytest.mark.parametrize(
    ("file", "line", "faulty"),
    [
        ("cli/x.py", "def f():\n    import torch", True),
        ("data/x.py", "import torch.nn as nn", True),
        ("plan/x.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import torch", True),
        ("__init__.py", "import torch", True),
        ("data/x.py", "import torchvision", False),
        ("launch/x.py", "def f():\n    import matplotlib.pyplot", False),
        ("launch/x.py", "import matplotlib.pyplot", True),
        ("engine/x.py", "import torch", False),
        ("engine/x.py", "def f():\n    from hydra import compose", True),
        ("engine/x.py", "import typer", True),
        ("kernels/x.py", "import triton", False),
        ("engine/model/x.py", "import torch.nn.functional", False),
        ("engine/model/x.py", "import torch.distributed as dist", True),
        ("engine/model/x.py", "from torch import distributed", True),
        ("engine/train/x.py", "import torch.distributed", False),
        ("cli/x.py", "from click import echo", True),
    ],
)
def test_foreign_imports_are_checked(made_up, file, line, faulty):
    assert len(list(rules.foreign_imports(made_up({file: line})))) == faulty


def test_circles_are_found(made_up):
    tree = made_up(
        {
            "plan/a.py": "from megalaunch.plan.b import x",
            "plan/b.py": "def f():\n    from megalaunch.plan import c",
            "plan/c.py": "from . import a",
            "plan/d.py": "from megalaunch.plan import a",
            "plan/e.py": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from megalaunch.plan import f",
            "plan/f.py": "from megalaunch.plan import e",
        }
    )
    assert list(rules.circles(tree)) == ["plan.a -> plan.b -> plan.c -> plan.a"]


def test_bare_to_local_is_found(made_up):
    tree = made_up({"engine/param_layout.py": "x.to_local()", "engine/x.py": "a = 1\np.to_local(grad_placements=q)"})
    why = "only engine/param_layout.py and dtensor.py open a DTensor"
    assert list(rules.bare_to_local(tree)) == [f"megalaunch/engine/x.py:2: {why}"]


def test_branches_on_the_device_are_found(made_up):
    tree = made_up(
        {
            "engine/model/x.py": "if x.is_cpu:\n    pass\nif x.device.type == 'cpu':\n    pass",
            "engine/train/y.py": "y = x.is_cuda",
            "kernels/x.py": "if x.is_cpu:\n    pass",
            "engine/model/z.py": "if x.dtype == 'cpu' or x.device == y:\n    pass",
        }
    )
    why = "a branch on the device belongs behind a dispatch in kernels/"
    places = ["model/x.py:1", "model/x.py:3", "train/y.py:1"]
    assert sorted(rules.device_branches(tree)) == [f"megalaunch/engine/{place}: {why}" for place in places]


def test_names_of_devices_are_found(made_up):
    tree = made_up(
        {
            "engine/x.py": '"""Says cuda."""\nx = "cuda"\ntorch.cuda.synchronize()\ny.is_cuda',
            "engine/platform/cuda.py": "torch.cuda.synchronize()",
            "kernels/x.py": "x.is_cuda",
            "plan/x.py": 'text = "CUDA_VISIBLE_DEVICES="\nfrom torch import cuda',
        }
    )
    places = sorted(line.rpartition(": ")[0].partition(": ")[0] for line in rules.device_names(tree))
    assert places == [
        *(f"megalaunch/engine/x.py:{line}" for line in (2, 3, 4)),
        *(f"megalaunch/plan/x.py:{line}" for line in (1, 2)),
    ]


def test_grab_bags_are_found(made_up):
    tree = made_up({"plan/utils.py": "", "plan/base/x.py": "", "plan/baseline.py": ""})
    assert len(list(rules.grab_bags(tree))) == 1


@pytest.mark.parametrize(
    ("line", "faulty"),
    [
        ("subprocess.run(x, shell=True)", True),
        ("subprocess.run(x, shell=flag)", True),
        ("subprocess.run(x, shell=False)", False),
        ("os.system('x')", True),
        ("import pickle", True),
        ("from pickle import loads", True),
        ("import picklewrong", False),
        ("torch.load(p)", True),
        ("np.load(p)", True),
        ("np.load(p, allow_pickle=True)", True),
        ("np.load(p, mmap_mode='r', allow_pickle=False)", False),
        ("yaml.load(t)", True),
        ("yaml.safe_load(t)", False),
        ("eval(t)", True),
        ("model.eval()", False),
    ],
)
def test_unsafe_code_is_found(line, faulty):
    assert len(list(rules.unsafe_code("x.py", ast.parse(line)))) == faulty


def test_unfinished_words_are_found():
    marker = rules.UNFINISHED[0]
    assert list(rules.unfinished_words("x.py", f"a = 1\n# {marker}: later\n")) == [f"x.py:2: {marker}"]


def test_sizes_are_checked():
    long_function = "def f():\n" + "    x = 1\n" * rules.LONGEST_FUNCTION
    assert len(list(rules.too_long("x.py", long_function, ast.parse(long_function)))) == 1
    fitting = "def f():\n" + "    x = 1\n" * (rules.LONGEST_FUNCTION - 1)
    assert list(rules.too_long("x.py", fitting, ast.parse(fitting))) == []
    long_file = "x = 1\n" * (rules.LONGEST_FILE + 1)
    assert len(list(rules.too_long("x.py", long_file, ast.parse(long_file)))) == 1
