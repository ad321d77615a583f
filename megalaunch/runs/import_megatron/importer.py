"""Convert a Megatron-LM launch script or argument list to a recipe, with a report of every flag."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from megalaunch.config.keys import MISSING_VALUE, schema_defaults, schema_keys
from megalaunch.format.table import table_lines
from megalaunch.format.yaml_value import to_yaml
from megalaunch.importers.megatron.arguments import Arguments, Report, flag_keys, is_flag, parse_arguments, reports
from megalaunch.importers.megatron.attention_kernel import attention_backend
from megalaunch.importers.megatron.bash_expansion import known_texts
from megalaunch.importers.megatron.bash_interpreter import Script, read_script, split_text
from megalaunch.importers.megatron.bash_lexer import MAX_BYTES, ScriptProblem
from megalaunch.importers.megatron.flag_table import DIRECT, EXPERTS, LATENT, LAUNCHER_FLAGS
from megalaunch.importers.megatron.model_values import model_values
from megalaunch.importers.megatron.training_values import training_values
from megalaunch.runs.import_megatron.recipe_file import RecipeFiles, write_recipe
from megalaunch.schema import RunSpec, SpecError
from megalaunch.schema.build import check_leaves
from megalaunch.schema.paths import entry_at

__all__ = ["Imported", "ScriptProblem", "import_script"]

_IN_VALUES = ("|", "(", ")")  # operators of bash that values of flags may have


@dataclass(frozen=True)
class Imported:
    """An imported recipe, the value of every key set by the script or Megatron's defaults, and the flags' reports.

    `defaults` are the keys that no flag set and whose Megatron default differs from megalaunch's. `problems` are
    contradictions in the script, with which neither Megatron-LM nor the recipe starts.
    """

    recipe: RecipeFiles
    values: Mapping[str, Any]
    flags: tuple[Report, ...]
    defaults: Mapping[str, Any]
    missing: tuple[str, ...]
    notes: tuple[str, ...]
    problems: tuple[str, ...] = ()


def import_script(
    text: str, name: str, source: str, given: Mapping[str, str] | None = None, platform: str | None = None
) -> Imported:
    """Import a script, an argument list or an argument file. Nothing is executed, and no file is opened.

    Args:
        text: the content.
        name: name of the recipe.
        source: name of the file in the recipe's comment.
        given: values of variables that are set outside of the script (`1` is its first argument).
        platform: the platform option of the recipe; None picks none.

    Raises:
        ScriptProblem: the text is none of the three.
    """
    if len(text) > MAX_BYTES:
        raise ScriptProblem(1, f"has {len(text):,} characters; the limit is {MAX_BYTES:,}")
    script = read_script(text, given or {})
    launcher, command, found_in = _find_launch(script)
    arguments = parse_arguments(command)
    if not any(flag_keys(name) for name in arguments.given):
        raise ScriptProblem(1, "has no Megatron-LM argument (such as --num-layers 32)")
    cluster = _cluster(launcher, script.sbatch_arguments)
    exported = dict(export.split("=", 1) for export in script.exports)
    kernel, read = attention_backend(arguments, exported)
    values = _values(arguments, cluster, kernel)
    defaults = _implicit_defaults(arguments, values)
    notes = [*found_in, *script.notes, *(f"the argument {stray!r} belongs to no flag" for stray in arguments.stray)]
    if read:
        notes.append(f"read for model.attention_backend: {', '.join(read)}")
    if exported.keys() - set(read):
        notes.append(f"environment variables are not imported: {', '.join(sorted(exported.keys() - set(read)))}")
    recipe = write_recipe(name, values, platform, source)
    return Imported(
        recipe,
        values,
        tuple(reports(arguments, values)),
        defaults,
        _missing(values, recipe),
        tuple(notes),
        tuple(_layout_problems(values)),
    )


def _find_launch(script: Script) -> tuple[list[str], list[str], list[str]]:
    """Find the command with the most known Megatron flags.

    Returns:
        Its arguments up to the training script, the arguments after it, and notes.
    """
    bare = [argument for command in script.commands if is_flag(command.argv[0]) for argument in command.argv]
    candidates = [bare, *(list(command.argv) for command in script.commands)]
    best = max(candidates, key=lambda argv: _count_known_flags(_unwrap_shell(script, argv)))
    _refuse_cut(script)
    argv, notes = _unwrap_shell(script, best), []
    variables = known_texts(script.variables)
    for name, text in variables.items():
        inside = list(split_text(script, text)) if "--" in text else []
        if _count_known_flags(inside) > _count_known_flags(argv):
            argv, notes = inside, [f"the arguments come from the variable {name}: no command has as many known flags"]
    at = next((index for index, argument in enumerate(argv) if re.search(r"\.py$", argument)), -1)
    if at < 0:
        at = next(
            (
                index + 1
                for index, argument in enumerate(argv[:-1])
                if argument == "-m" and "torch" not in argv[index + 1]
            ),
            -1,
        )
    return argv[: at + 1], argv[at + 1 :], notes


def _refuse_cut(script: Script) -> None:
    """Raise ScriptProblem if bash would end a command with flags at an operator that belongs to one of its values."""
    begun = is_list = False  # whether a command of the same pipeline has known flags, and begins with a flag
    for command in script.commands:
        begun, begins_with_flag = begun and command.after in _IN_VALUES, is_flag(command.argv[0])
        is_rest = command.after == "|" or (command.after == ")" and begins_with_flag and not is_list)
        has_flags = bool(_count_known_flags(command.argv))
        if begun and is_rest and has_flags:
            raise ScriptProblem(
                command.line,
                f"bash ends the command before {command.argv[0]!r}, at a {command.after!r} without quotes, and loses"
                " the flags after it; put the whole value in quotes, such as 'Et|t|tL' or '([0]*3+[1]*58)'",
            )
        begun, is_list = begun or has_flags, is_list or begins_with_flag


def _unwrap_shell(script: Script, argv: Sequence[str]) -> list[str]:
    """Expand arguments that contain a command line (`bash -c "..."`)."""
    expanded: list[str] = []
    for argument in argv:
        if argument.count("--") > 1 and " " in argument.strip() and len(argv) < 60:
            expanded += split_text(script, argument)
        else:
            expanded.append(argument)
    return expanded


def _count_known_flags(arguments: Sequence[str]) -> int:
    flags = [argument.partition("=")[0] for argument in arguments if is_flag(argument)]
    return sum(bool(flag_keys(flag.lstrip("-").replace("_", "-"))) for flag in flags)


def _cluster(launcher: Sequence[str], batch: Sequence[str]) -> dict[str, int]:
    """Return the number of nodes and of devices per node that torchrun, srun or #SBATCH set."""
    values: dict[str, int] = {}
    arguments = [*batch, *launcher]
    for index, argument in enumerate(arguments):
        flag, equals, value = argument.partition("=")
        flag = {"-N": "--nodes"}.get(flag, flag)
        key = LAUNCHER_FLAGS.get(flag.lstrip("-").replace("_", "-")) if flag.startswith("--") else None
        value = value if equals else arguments[index + 1] if index + 1 < len(arguments) else ""
        if argument.startswith("--gres=gpu"):
            key, value = "cluster.devices_per_node", argument.rpartition(":")[2]
        if key and value.isdigit() and int(value) > 0:
            values[key] = int(value)
    return values


def _values(given: Arguments, cluster: Mapping[str, int], kernel: Mapping[str, Any]) -> dict[str, Any]:
    """Convert all flags to run spec keys, in the schema's order; `kernel` is the key of the attention backend."""
    values: dict[str, Any] = {}
    rows = list(DIRECT)
    for needed, table in (("num-experts", EXPERTS), ("multi-latent-attention", LATENT)):
        if given.has(needed):
            rows += table
        else:
            for flag, _, _, _ in table:
                given.mark_ignored(flag, f"has no effect without --{needed}")
    for flag, key, kind, default in rows:
        value = _direct(given, flag, kind)
        value = default if value is None else value
        if value is not None and not (key in values and flag not in given.given):
            values[key] = value
    world = None
    if len(cluster) == 2:
        world = cluster["cluster.nodes"] * cluster["cluster.devices_per_node"]
    values |= model_values(given) | training_values(given, world) | dict(cluster) | dict(kernel)
    _drop_invalid(given, values)
    order = {key: index for index, key in enumerate(schema_keys())}
    return {key: values[key] for key in sorted(values, key=order.__getitem__)}


def _drop_invalid(given: Arguments, values: dict[str, Any]) -> None:
    """Drop values that their key does not accept (an unsupported choice, a size of 0), and mark their flags."""
    for key in list(values):
        try:
            check_leaves(RunSpec, {key: values[key]})
        except SpecError as error:
            del values[key]
            for flag in given.given:
                if key in flag_keys(flag):
                    given.mark_unsupported(flag, f"{key} {error.problems[0].message}")


def _direct(given: Arguments, flag: str, kind: type) -> Any:
    if kind is bool:
        return True if given.has(flag) else None
    if kind is int:
        return given.integer(flag)
    return given.number(flag) if kind is float else given.value(flag)


def _implicit_defaults(given: Arguments, values: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys that no flag set and whose Megatron default differs from megalaunch's."""
    explicit = {key for name in given.given for key in flag_keys(name)}
    nested = schema_defaults()
    return {
        key: value
        for key, value in values.items()
        if key not in explicit and not key.startswith("cluster.") and value != entry_at(nested, key)
    }


def _layout_problems(values: Mapping[str, Any]) -> Iterator[str]:
    """Yield why the devices that the script starts cannot hold its layout, if it says how many they are."""
    nodes, devices = values.get("cluster.nodes"), values.get("cluster.devices_per_node")
    if nodes is None or devices is None:
        return
    grids = [("tp", "pp", "cp"), *([("etp", "ep", "pp")] if values.get("model.moe.num_experts") else [])]
    for axes in grids:
        degrees = {axis: values.get(f"parallel.{axis}") or 1 for axis in axes}
        needed = math.prod(degrees.values())
        if nodes * devices % needed:
            shown = " x ".join(f"{axis} {degree}" for axis, degree in degrees.items() if degree > 1)
            count = f"{needed} devices" if nodes * devices < needed else f"a multiple of {needed} devices"
            yield f"the script starts {nodes} x {devices} devices, and its layout needs {count} ({shown})"


def _missing(values: Mapping[str, Any], recipe: RecipeFiles) -> tuple[str, ...]:
    """Return the keys without a default that neither the script nor the chosen model sets."""
    nested = schema_defaults()
    return tuple(
        key
        for key in schema_keys()
        if entry_at(nested, key) == MISSING_VALUE
        and key not in values
        and not (key.startswith("model.") and "model" in recipe.picked)
    )


def report_text(imported: Imported) -> str:
    """Format the report of all flags, grouped by result, as aligned lines."""
    titles = {
        "mapped": "mapped",
        "unsupported": "not supported: the imported run differs from the script's",
        "unresolved": "values known only to the running shell: give them with --set NAME=VALUE or in the recipe",
        "unknown": "unknown flags",
        "ignored": "ignored: no effect on the trained model",
    }
    blocks = []
    for status, title in titles.items():
        entries = [entry for entry in imported.flags if entry.status == status]
        rows = [(" ".join([entry.flag, *entry.values]), entry.text) for entry in entries]
        if rows:
            blocks.append("\n".join([f"{title} ({len(rows)})", *table_lines(rows, max_width=52)]))
    if imported.defaults:
        lines = [f"  {key} = {to_yaml(value)}" for key, value in imported.defaults.items()]
        blocks.append("\n".join(["Megatron's defaults that differ from megalaunch's", *lines]))
    if imported.missing:
        blocks.append("\n".join(["missing: set these keys in the recipe", *(f"  {key}" for key in imported.missing)]))
    if imported.problems:
        lines = [f"  {problem}" for problem in imported.problems]
        blocks.append("\n".join(["cannot start: correct this in the recipe", *lines]))
    if imported.notes:
        blocks.append("\n".join(["notes", *(f"  {note}" for note in imported.notes)]))
    return "\n\n".join(blocks)
