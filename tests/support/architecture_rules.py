"""The rules of the house as functions over a source tree: who may import whom, and what no file may hold.

Each rule takes a Tree and yields one line a violation; tests/project/test_architecture.py runs them on ours and
on made-up trees that break them.
"""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

LAUNCHER_WING = (
    *(
        "cli",
        "runs",
        "config",
        "hub",
        "importers",
        "plan",
        "launchers",
        "launch",
        "data",
        "platform",
        "schema",
        "rundir",
        "format",
        "http_access",
        "fs",
        "process",
        "installation",
        "version",
    ),
)

# Room -> what it may import of ours, besides itself and `version`; a longer name speaks for a file alone. DESIGN
# section 2.
ARROWS = {
    "version": (),
    "format": (),
    "fs": (),
    "process": (),
    "installation": (),
    "http_access": ("fs",),
    "rundir": ("fs", "process"),
    "schema": ("fs",),
    "hub": ("schema", "installation"),
    "config": ("schema", "format", "hub", "importers.huggingface", "importers.megatron.spelling", "platform.plugins"),
    "importers.huggingface": ("schema", "plan.layers", "plan.attention_factor"),
    "importers.megatron": ("schema", "format.yaml_value", "plan.batch"),
    "platform": ("schema", "format", "installation"),
    "data": ("schema", "fs", "installation"),
    "plan": ("schema", "platform", "format"),
    "launch": ("schema", "plan", "data", "platform", "rundir", "format", "http_access", "fs", "process"),
    "launchers": ("schema", "launch", "rundir", "fs", "process", "installation"),
    "kernels": ("platform",),
    "engine": (
        "schema",
        "importers",
        "plan",
        "data",
        "platform",
        "kernels",
        "rundir",
        "format",
        "http_access",
        "fs",
    ),
    "runs": (
        *("config", "hub", "importers.megatron", "schema", "plan", "data", "platform", "launch", "launchers"),
        *("rundir", "format", "http_access", "fs", "process", "installation", "engine.api"),
    ),
    "cli": (
        "config",
        "hub",
        "schema",
        "importers",
        "plan",
        "data",
        "platform",
        "launch",
        "launchers",
        "rundir",
        "runs",
        "format",
        "http_access",
        "fs",
        "installation",
        "engine.api",
    ),
    "__main__": ("cli",),
    "nn": ("engine",),
}

# Files with private names of torch: all of them, those that override private methods, those read without an import.
TORCH_PRIVATE = (
    "megalaunch/engine/torch_private.py",
    "megalaunch/engine/parallel/pipeline_schedule.py",
    "megalaunch/engine/parallel/pipeline_stage.py",
    "megalaunch/engine/hang_dump.py",
    "megalaunch/kernels/flash_attention.py",
    "kernels/flash_attention.py",
)

# From the ground up; a floor imports only from floors below it, and rooms of one floor do not know each other.
# A name with a dot is a file that stands on another floor than its folder.
ENGINE_FLOORS = (
    ("torch_private",),
    ("platform",),
    ("worker_setup", "run_end", "hang_dump", "nvrx_reporter", "restricted_objects", "scored_pairs"),
    ("agent", "process_group", "measure", "precision", "mesh"),
    ("param_layout", "autograd"),
    ("collectives", "dtensor"),
    ("model",),
    ("weight_maps", "parallel"),
    ("parallel.parallelize",),
    ("checkpoint",),
    ("optimizer",),
    ("train", "inference", "operator_cases"),
    ("run_rank", "simulate", "operator_check", "inference.perplexity"),
    ("inference.jobs", "lm_eval_adapter"),
    ("training_tasks",),
    ("train_rank", "inference_rank", "library"),
    ("api", "worker"),
    ("inference_worker",),
)

# As ENGINE_FLOORS: a token's way from a text to a sample.
DATA_FLOORS = (
    ("errors", "prepared_files", "worker_process"),
    ("cached_directory", "tokenizer", "remote_store"),
    ("remote_reader",),
    ("remote_file",),
    ("indexed_dataset",),
    ("preprocess", "samples"),
    ("prepare", "train_tokenizer"),
)
FLOORS = {"engine": ENGINE_FLOORS, "data": DATA_FLOORS}

FOREIGN_TO_LAUNCHER = ("torch", "safetensors", "transformer_engine", "triton", "transformers", "lm_eval")
FOREIGN_TO_ENGINE = ("hydra", "omegaconf", "typer", "click", "rich")
# The one importer of pickles; tests/cli/test_import_megatron_checkpoint.py holds it to running nothing.
AUDITED = "megalaunch/engine/checkpoint/safe_unpickler.py"
UNPICKLERS = ("pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib")
GRAB_BAGS = ("utils", "util", "helpers", "helper", "common", "manager", "base", "misc")
UNFINISHED = ("TO" + "DO", "FIX" + "ME", "X" * 3, "Not" + "ImplementedError")
LONGEST_FILE = 500
LONGEST_FUNCTION = 60


@dataclass(frozen=True)
class Import:
    """One name that a module imports: `target` is dotted and absolute; `lazy` means inside a function."""

    target: str
    line: int
    lazy: bool
    typing_only: bool


@dataclass(frozen=True)
class Module:
    """A parsed file. `name` is dotted below megalaunch ("plan.check"), "" for the package itself."""

    name: str
    path: str
    text: str
    tree: ast.Module
    is_package: bool

    @property
    def room(self) -> str:
        return self.name.partition(".")[0]

    @cached_property
    def imports(self) -> list[Import]:
        return list(_imports(self))


class Tree:
    """All Python files below ROOT/megalaunch, its symlinks followed, by dotted name."""

    def __init__(self, root: Path) -> None:
        self.modules: dict[str, Module] = {}
        for folder, _, files in os.walk(root / "megalaunch", followlinks=True):
            for file in files:
                if file.endswith(".py"):
                    self._add(root, Path(folder) / file)

    def _add(self, root: Path, path: Path) -> None:
        parts = path.relative_to(root / "megalaunch").with_suffix("").parts
        is_package = parts[-1] == "__init__"
        name = ".".join(parts[:-1] if is_package else parts)
        text = path.read_text(encoding="utf-8")
        self.modules[name] = Module(name, str(path.relative_to(root)), text, ast.parse(text), is_package)

    def ours(self, target: str) -> str | None:
        """The module of ours that an import names ("plan.check"), or None for anything else."""
        package, _, name = target.partition(".")
        if package != "megalaunch":
            return None
        while name and name not in self.modules:  # `from x import name`: the module is the longest known prefix
            name = name.rpartition(".")[0]
        return name


def _imports(module: Module) -> Iterator[Import]:
    stack: list[tuple[ast.AST, bool, bool]] = [(module.tree, False, False)]
    while stack:
        node, lazy, typing_only = stack.pop()
        if isinstance(node, ast.Import):
            yield from (Import(alias.name, node.lineno, lazy, typing_only) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            source = _absolute(module, node)
            yield from (Import(f"{source}.{alias.name}", node.lineno, lazy, typing_only) for alias in node.names)
        elif isinstance(node, ast.Call) and _dotted(node.func).rpartition(".")[2] in ("import_module", "__import__"):
            names = [argument.value for argument in node.args[:1] if isinstance(argument, ast.Constant)]
            yield from (Import(str(name), node.lineno, lazy, typing_only) for name in names)
        inside = lazy or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        if isinstance(node, ast.If) and _dotted(node.test).endswith("TYPE_CHECKING"):
            stack += [(child, inside, True) for child in node.body]
            stack += [(child, inside, typing_only) for child in node.orelse]
        else:
            stack += [(child, inside, typing_only) for child in ast.iter_child_nodes(node)]


def _absolute(module: Module, node: ast.ImportFrom) -> str:
    if node.level == 0:
        return node.module or ""
    parts = ["megalaunch", *(part for part in module.name.split(".") if part)]
    parts = parts[: len(parts) - node.level + (1 if module.is_package else 0)]
    return ".".join([*parts, *([node.module] if node.module else [])])


def _dotted(node: ast.AST) -> str:
    """`a.b.c` of a name or attribute chain, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        return f"{_dotted(node.value)}.{node.attr}"
    return ""


def _longest_prefix(name: str, known: Collection[str]) -> str | None:
    """The longest name in `known` that is `name` or a package around it ("importers.megatron")."""
    while name and name not in known:
        name = name.rpartition(".")[0]
    return name or None


def _within(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def wrong_arrows(tree: Tree) -> Iterator[str]:
    """Imports of ours that the table does not allow; `cli` and `runs` take `engine.api` only inside functions."""
    for module in tree.modules.values():
        for entry in module.imports:
            name = tree.ours(entry.target)
            if not name or name.partition(".")[0] == module.room:
                continue
            if not module.name and entry.typing_only:  # the public names, which are imported when first used
                continue
            where = f"{module.path}:{entry.line}"
            allowed = ("version", *ARROWS.get(_longest_prefix(module.name, ARROWS) or "", ()))
            if not _within(name, allowed):
                yield f"{where}: {module.room or 'the package'} may not import {name}"
            elif (
                module.room in ("cli", "runs")
                and _within(name, ("engine",))
                and not entry.lazy
                and not entry.typing_only
            ):
                yield f"{where}: {name} only inside a command's body"


def wrong_floors(tree: Tree) -> Iterator[str]:
    """Imports inside the engine and inside data that go up, or sideways."""
    floor_of = {
        f"{wing}.{room}": floor
        for wing, floors in FLOORS.items()
        for floor, rooms in enumerate(floors)
        for room in rooms
    }
    for module in tree.modules.values():
        wing = module.room
        if wing not in FLOORS or module.name == wing:
            continue
        room = _longest_prefix(module.name, floor_of)
        if room is None:
            yield f"{module.path}:1: {'.'.join(module.name.split('.')[:2])} has no floor in {wing.upper()}_FLOORS"
            continue
        for entry in module.imports:
            name = tree.ours(entry.target) or ""
            other = _longest_prefix(name, floor_of) if name.startswith(f"{wing}.") else room
            if other != room and (other is None or floor_of[other] >= floor_of[room]):
                yield f"{module.path}:{entry.line}: {room} may not import {name}"


def foreign_imports(tree: Tree) -> Iterator[str]:
    """Torch in the launcher wing, front-end packages in the engine, torch.distributed in model files, click."""
    for module in tree.modules.values():
        for entry in module.imports:
            where = f"{module.path}:{entry.line}"
            if module.room != "engine" and module.room != "kernels" and _within(entry.target, FOREIGN_TO_LAUNCHER):
                yield f"{where}: the launcher wing never imports {entry.target}"
            lazy = entry.lazy or entry.typing_only
            if module.room in LAUNCHER_WING and _within(entry.target, ("matplotlib", "jinja2")) and not lazy:
                yield f"{where}: {entry.target} is no part of the plain install; import it inside the function"
            if module.room in ("engine", "kernels") and _within(entry.target, FOREIGN_TO_ENGINE):
                yield f"{where}: the engine never imports {entry.target}"
            if _within(module.name, ("engine.model",)) and _within(entry.target, ("torch.distributed",)):
                yield f"{where}: model files know no process group ({entry.target})"
            if _within(entry.target, ("click",)):
                yield f"{where}: typer brings its own click; import nothing of click"


def circles(tree: Tree) -> Iterator[str]:
    """Modules that import each other in a circle (imports for types only aside)."""
    edges = {
        module.name: {
            name
            for entry in module.imports
            if not entry.typing_only and (name := tree.ours(entry.target)) and name != module.name
        }
        for module in tree.modules.values()
    }
    finished: set[str] = set()
    for start in sorted(edges):
        path: list[str] = []
        stack: list[tuple[str, bool]] = [(start, False)]
        while stack:
            name, leaving = stack.pop()
            if leaving:
                path.pop()
                finished.add(name)
            elif name in path:
                yield " -> ".join([*path[path.index(name) :], name])
            elif name not in finished:
                path.append(name)
                stack.append((name, True))
                stack += [(other, False) for other in sorted(edges[name])]


def bare_to_local(tree: Tree) -> Iterator[str]:
    """`.to_local(` outside the files that say what a gradient through it means (param_layout) or shard it (dtensor)."""
    for module in tree.modules.values():
        if module.name in ("engine.param_layout", "engine.dtensor"):
            continue
        for node in ast.walk(module.tree):
            if isinstance(node, ast.Attribute) and node.attr == "to_local":
                yield f"{module.path}:{node.lineno}: only engine/param_layout.py and dtensor.py open a DTensor"


def device_branches(tree: Tree) -> Iterator[str]:
    """Branches on the device in model and trainer: what differs by device is behind a dispatch in kernels/."""
    for module in tree.modules.values():
        if not _within(module.name, ("engine.model", "engine.train")):
            continue
        for node in ast.walk(module.tree):
            asks = isinstance(node, ast.Attribute) and node.attr in ("is_cpu", "is_cuda")
            if isinstance(node, ast.Compare) and _dotted(node.left).endswith("device.type"):
                asks = any(isinstance(other, ast.Constant) and other.value == "cpu" for other in node.comparators)
            if asks:
                yield f"{module.path}:{node.lineno}: a branch on the device belongs behind a dispatch in kernels/"


# What may name a kind of device: platforms and the dispatch of operators; importers spell flags of others.
DEVICE_ROOMS = ("platform", "engine.platform", "kernels", "importers", "engine.checkpoint.safe_unpickler")


def device_names(tree: Tree) -> Iterator[str]:
    """`cuda` in a name or a string, outside the rooms of platforms: torch.cuda, "cuda", is_cuda.

    CUDA graphs are the name of a technique, of other devices too.
    """
    for module in tree.modules.values():
        if _within(module.name, DEVICE_ROOMS):
            continue
        prose = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}  # docstrings
        for node in ast.walk(module.tree):
            said = ""
            if isinstance(node, ast.Constant):
                said = node.value if isinstance(node.value, str) and id(node) not in prose else ""
            elif isinstance(node, (ast.Name, ast.Attribute, ast.FunctionDef, ast.ClassDef, ast.alias)):
                said = getattr(node, "attr", "") or getattr(node, "id", "") or getattr(node, "name", "")
            if "cuda" in re.sub("cuda[ _]graphs", "", said.lower()):
                yield f"{module.path}:{node.lineno}: {said!r} names a kind of device; ask a platform"


def private_names(path: str, tree: ast.Module) -> Iterator[str]:
    """Private names of other packages, torch's above all: they belong into engine/torch_private.py."""
    if path in TORCH_PRIVATE:
        return
    own = {node.name for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    own |= {node.id for node in ast.walk(tree) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)}
    own |= {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and _dotted(node.value) == "self"}
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            source = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for name in (f"{source}{alias.name}" for alias in node.names):
                if _within(name, ("torch",)) and any(part.startswith("_") for part in name.split(".")):
                    yield f"{path}:{node.lineno}: {name} belongs into engine/torch_private.py"
        elif isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            known = own | {"_replace"}  # of named tuples: no private name
            if _dotted(node.value) not in ("self", "cls", "os", "sys") and node.attr not in known:
                yield f"{path}:{node.lineno}: {ast.unparse(node)} belongs into engine/torch_private.py"


def unsafe_code(path: str, tree: ast.Module) -> Iterator[str]:
    """Shells, unpickling, code from data."""
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            for name in names:
                if name.partition(".")[0] in UNPICKLERS and (path, name) != (AUDITED, "pickle"):
                    yield f"{path}:{node.lineno}: no {name}: it runs code from files"
        elif isinstance(node, ast.Call):
            for reason in _unsafe_call(node):
                yield f"{path}:{node.lineno}: {reason}"


def _unsafe_call(node: ast.Call) -> Iterator[str]:
    name = _dotted(node.func)
    keywords = {keyword.arg: keyword.value for keyword in node.keywords}
    for switch in ("shell", "allow_pickle", "trust_remote_code"):
        value = keywords.get(switch)
        if value is not None and not (isinstance(value, ast.Constant) and value.value is False):
            yield f"{switch} must not be anything but False"
    if name in ("np.load", "numpy.load") and "allow_pickle" not in keywords:
        yield f"{name} must say allow_pickle=False"
    forbidden = (
        "os.system",
        "os.popen",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "torch.load",
        "torch.save",
    )
    if name in (*forbidden, "eval", "exec", "yaml.load", "yaml.unsafe_load", "yaml.full_load"):
        yield f"no {name}"


# Writers that open a fresh file of their own (O_EXCL, or in a directory just made), or what the user named.
OWN_WRITERS = ("megalaunch/engine/checkpoint/export_huggingface.py",)


def unguarded_writes(path: str, tree: ast.Module) -> Iterator[str]:
    """Files of a run that are opened for writing where a planted link would be followed: see fs.py."""
    if path in OWN_WRITERS:
        return
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        name = _dotted(node.func) or (node.func.attr if isinstance(node.func, ast.Attribute) else "")
        method = name.rpartition(".")[2]
        if method in ("write_text", "write_bytes"):
            yield f"{path}:{node.lineno}: {method} follows links"
        elif name == "os.open" and "O_CREAT" in ast.dump(node):
            yield f"{path}:{node.lineno}: os.open follows links"
        elif method == "open" and name != "os.open":
            modes = [argument.value for argument in node.args if isinstance(argument, ast.Constant)]
            if any(isinstance(mode, str) and set(mode) <= set("wxabt+") and mode for mode in modes):
                yield f"{path}:{node.lineno}: open follows links"


def unfinished_words(path: str, text: str) -> Iterator[str]:
    """Marks of something left for later."""
    for number, line in enumerate(text.splitlines(), 1):
        for marker in UNFINISHED:
            if marker in line:
                yield f"{path}:{number}: {marker}"


def too_long(path: str, text: str, tree: ast.Module) -> Iterator[str]:
    """Files and functions over the limits of DESIGN section 7."""
    lines = text.count("\n")
    if lines > LONGEST_FILE:
        yield f"{path}:1: {lines} lines, the limit is {LONGEST_FILE}"
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > LONGEST_FUNCTION:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines, the limit is {LONGEST_FUNCTION}"


def grab_bags(tree: Tree) -> Iterator[str]:
    """Modules whose name says nothing about what is in them."""
    for module in tree.modules.values():
        if module.name.rpartition(".")[2] in GRAB_BAGS:
            yield f"{module.path}:1: a name that says what the file is for"
