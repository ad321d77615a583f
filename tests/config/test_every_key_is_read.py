"""No setting without a reader, and none that a run ignores: every leaf of the schema is used by code outside config/
and printing, and by what runs, or refused, or without meaning beside one that is refused.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import is_dataclass
from pathlib import Path

import megalaunch
from megalaunch.config.keys import schema_keys
from megalaunch.schema import RunSpec
from megalaunch.schema.build import resolve_annotations

PACKAGE = Path(megalaunch.__file__).parent
ROOMS = ("plan", "data", "launch", "launchers", "platform", "engine", "rundir")

# Where a run happens. Of the plan's files, those whose results the engine acts on.
RUN_ROOMS = ("engine", "data", "launch", "launchers", "platform", "rundir")
RUN_FILES = ("plan/topology.py", "plan/resolve.py", "plan/stages.py", "plan/stage_validation.py", "plan/layers.py",
             "plan/memory/loss_chunks.py")  # fmt: skip
# Keys that are not for a run: they name it, start it or plan it.
# (parallel.overlap_p2p_comm: torch's interleaved schedules send without waiting, always; a plan compares both.)
ELSEWHERE = {
    *("cluster.node_bandwidth", "cluster.cpu_workers", "launcher.name", "parallel.overlap_p2p_comm"),
    *("cluster.node_latency", "cluster.sites", "cluster.site_bandwidth", "cluster.site_latency"),
    "parallel.moe_load_imbalance",
    "launcher.min_nodes",  # of the command that submits: its job has the numbers of nodes that the plan found valid
    "run.hub_revisions",  # of the launcher, which pins the names of a resume by it
}


def sections_of(kind: type, prefix: str = "") -> Iterator[tuple[str, type]]:
    """`model`, `model.moe`, ... and their dataclasses."""
    for name, annotation in resolve_annotations(kind).items():
        if is_dataclass(annotation) and isinstance(annotation, type):
            yield f"{prefix}{name}", annotation
            yield from sections_of(annotation, f"{prefix}{name}.")


SECTIONS = {path.rpartition(".")[2]: path for path, _ in sections_of(RunSpec)}
SECTION_OF_TYPE = {kind.__name__: path for path, kind in sections_of(RunSpec)}


def keys_read_in(source: str) -> Iterator[str]:
    """`spec.train.steps`; `train.steps` after `train = spec.train`; `data.corpus` of a parameter `data: DataSpec`."""
    tree = ast.parse(source)
    names = _names_of_sections(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            section = _section_of(node.value, names)
            if section:
                yield f"{section}.{node.attr}"
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            section = _section_of(node.args[0], names)
            values = [node.args[1]] if isinstance(node.args[1], ast.Constant) else _loop_values(tree, node.args[1])
            yield from (f"{section}.{value.value}" for value in values if section)


def _section_of(node: ast.expr, names: dict[str, str]) -> str | None:
    if isinstance(node, ast.Attribute) and node.attr in SECTIONS:
        outer, _, _ = SECTIONS[node.attr].rpartition(".")
        if _section_of(node.value, names) == outer if outer else _is_spec(node.value):
            return SECTIONS[node.attr]
    if isinstance(node, ast.Name):
        return names.get(node.id)
    if isinstance(node, ast.Attribute):  # self.settings, self._data
        return names.get(node.attr)
    return None


def _is_spec(node: ast.expr) -> bool:
    name = getattr(node, "attr", "") or getattr(node, "id", "")
    return "spec" in name or name in ("stored", "new")


def _names_of_sections(tree: ast.AST) -> dict[str, str]:
    names: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.arg) or (isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)):
            name = node.arg if isinstance(node, ast.arg) else node.target.id
            written = ast.unparse(node.annotation).split(" |")[0].strip("'\"") if node.annotation else ""
            if written in SECTION_OF_TYPE:
                names |= {name: SECTION_OF_TYPE[written], f"_{name}": SECTION_OF_TYPE[written]}
    for node in ast.walk(tree):  # an assignment may stand nearer to the module than the annotation that it needs
        if isinstance(node, ast.Assign):
            for target in node.targets:
                names |= dict(_assigned(target, node.value, names))
    return names


def _assigned(target: ast.expr, value: ast.expr, names: dict[str, str]) -> Iterator[tuple[str, str]]:
    if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple):
        for left, right in zip(target.elts, value.elts, strict=False):
            yield from _assigned(left, right, names)
    name = getattr(target, "id", None) or getattr(target, "attr", None)
    if name and isinstance(value, ast.Attribute) and value.attr in SECTIONS:
        section = _section_of(value, names)
        if section:
            yield name, section


def _loop_values(tree: ast.AST, name: ast.expr) -> list[ast.Constant]:
    """Constants that a loop variable runs over."""
    return [
        constant
        for node in ast.walk(tree)
        if isinstance(node, ast.For | ast.comprehension) and ast.unparse(name) in ast.unparse(node.target)
        for constant in ast.walk(node.iter)
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str)
    ]


def keys_read() -> set[str]:
    found: set[str] = set()
    for room in ROOMS:
        for path in (PACKAGE / room).rglob("*.py"):
            found.update(keys_read_in(path.read_text(encoding="utf-8")))
    return found


def test_every_key_has_a_reader():
    unread = set(schema_keys()) - keys_read()
    assert not unread, f"settings that nothing reads: {sorted(unread)}"


def test_the_walk_sees_what_code_does():
    source = """
def f(spec, data: DataSpec, x):
    t, s = spec.train, self.spec.schedule
    for beta in ("beta1", "beta2"):
        getattr(spec.optimizer, beta)
    moe = spec.model.moe
    return t.steps + s.min_lr + data.corpus + spec.batch.sequence_length + x.seed + moe.top_k + x.rope.theta
"""
    assert set(keys_read_in(source)) >= {
        "train.steps", "schedule.min_lr", "data.corpus", "batch.sequence_length", "optimizer.beta1", "optimizer.beta2",
        "model.moe.top_k",
    }  # fmt: skip
    assert not {"train.seed", "model.rope.theta"} & set(keys_read_in(source))
    assert set(keys_read_in("'train.steps'")) == set()


def read_by_a_run():
    found = set()
    for room in RUN_ROOMS:
        for path in (PACKAGE / room).rglob("*.py"):
            found.update(keys_read_in(path.read_text(encoding="utf-8")))
    for name in RUN_FILES:
        found.update(keys_read_in((PACKAGE / name).read_text(encoding="utf-8")))
    return found


def test_a_run_reads_every_key():
    ignored = set(schema_keys()) - read_by_a_run() - ELSEWHERE
    assert not ignored, f"a run ignores {sorted(ignored)}"
