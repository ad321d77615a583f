"""Complete `GROUP=OPTION` and `SECTION.KEY=VALUE` in bash, zsh, fish and PowerShell; Typer completes the rest.

bash splits `recipe=ll` at `=`; the override is joined again here. A single match is offered together with its possible
continuations, so that no shell appends a space to `recipe=`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

VARIABLE = "_MEGALAUNCH_COMPLETE"
OVERRIDE_COMMANDS = ("train", "validate-config", "plan", "sweep")
_HARMLESS = re.compile(r"[A-Za-z0-9_.,:=/~+-]*")
_LAYOUT_PARTS = ("tp2", "tp4", "tp8", "pp2", "pp4", "pp8", "cp2", "ep8", "vpp2", "dp2", "hsdp2", "sp", "zero2", "zero3")


@dataclass(frozen=True)
class Completion:
    """A candidate for the argument at the cursor, and one line of help."""

    text: str
    help: str = ""


@dataclass(frozen=True)
class Line:
    """A command line up to the cursor.

    Attributes:
        arguments: the complete arguments before the cursor.
        incomplete: the argument to complete.
        prefix: the part of `incomplete` that the shell does not replace.
    """

    arguments: tuple[str, ...]
    incomplete: str
    prefix: str = ""


def complete(environment: Mapping[str, str]) -> bool:
    """Print the completions of an override; return False if Typer has to complete the line.

    fish also asks whether there are completions; the answer is the exit code (0: yes).
    """
    _, _, shell = environment.get(VARIABLE, "").partition("complete_")
    if not shell:
        return False
    line = typed_line(shell, environment)
    found = completions(line)
    if found is None:
        return False
    if shell == "fish" and environment.get("_TYPER_COMPLETE_FISH_ACTION") == "is-args":
        raise SystemExit(0 if found else 1)
    print(_as_shell(shell, found, line))
    return True


def typed_line(shell: str, environment: Mapping[str, str]) -> Line:
    """Return the line as typed, with bash's pieces around `=` joined."""
    if shell != "bash":
        text = environment.get("_TYPER_COMPLETE_ARGS", "")
        words = _split(text)[1:]
        if shell in ("powershell", "pwsh"):
            incomplete = environment.get("_TYPER_COMPLETE_WORD_TO_COMPLETE", "")
            return Line(tuple(words[:-1] if incomplete else words), incomplete)
        at_end = not words or text.endswith(" ")
        return Line(tuple(words if at_end else words[:-1]), "" if at_end else words[-1])
    pieces = _split(environment.get("COMP_WORDS", ""))
    cursor = int(environment.get("COMP_CWORD") or 0)
    pieces = pieces[: cursor + 1] if cursor < len(pieces) else [*pieces, ""]
    words, prefix = [], ""
    for index, piece in enumerate(pieces[1:], start=1):
        if words and (piece == "=" or words[-1].endswith("=")) and not (piece == "" and index < cursor):
            if index == cursor:
                prefix = words[-1] + (piece if piece == "=" else "")
            words[-1] += piece
        else:
            words.append(piece)
    return Line(tuple(words[:-1]), words[-1] if words else "", prefix)


def completions(line: Line) -> list[Completion] | None:
    """Return the completions of the last argument; None if it is not an override."""
    if not line.arguments:
        return None
    command, before = line.arguments[0], line.arguments[-1]
    if command == "recipes" and line.arguments[1:2] in (("show",), ("diff",)):
        return None if line.incomplete.startswith("-") else _matching(_recipes(), line.incomplete)
    if command not in OVERRIDE_COMMANDS or line.incomplete.startswith("-"):
        return None
    if before == "--explain":
        return _keys(line.incomplete, "")
    if before.startswith("-") and "=" not in before and _takes_value(command, before):
        return None
    key, equals, value = line.incomplete.partition("=")
    if not equals:
        return _keys(key, "=")
    front, comma, last = value.rpartition(",") if command == "sweep" else ("", "", value)
    known = _values(key, last)
    return _matching(
        [Completion(f"{key}={front}{comma}{candidate.text}", candidate.help) for candidate in known], line.incomplete
    )


def _keys(incomplete: str, ending: str) -> list[Completion]:
    """Return matching groups, sections and keys, one level at a time; a single match with its continuations."""
    from megalaunch.config.keys import GROUPS, schema_keys

    if ending:
        named = [
            Completion("recipe=", "a complete run by name"),
            *(Completion(f"{group}=", "an option by name") for group in GROUPS),
        ]
    else:
        named = []
    level = incomplete.count(".")
    found = {candidate.text: candidate for candidate in named}
    for path, key in schema_keys().items():
        parts = path.split(".")
        name = ".".join(parts[: level + 1])
        if name == path:
            found[path + ending] = Completion(path + ending, key.field.metadata["meaning"])
        else:
            found.setdefault(f"{name}.", Completion(f"{name}.", "a section"))
    matching = _matching(found.values(), incomplete)
    if len(matching) != 1:
        return matching
    (only,) = matching
    if only.text.endswith("."):
        return _keys(only.text, ending)
    if only.text.endswith("="):
        return [only, *(Completion(only.text + value.text, value.help) for value in _values(only.text[:-1], ""))]
    return matching


def _values(key: str, typed: str) -> list[Completion]:
    """Return the options of a config group, or the values of a key that has a finite list."""
    from megalaunch.config.keys import GROUPS

    if key == "recipe":
        return _recipes()
    if key in GROUPS:
        from megalaunch.config.groups import option_names

        layouts = [Completion(layout) for layout in _layouts(typed)] if key == "parallel" else []
        folders = _model_folders(typed) if key == "model" else []
        return [*(Completion(name) for name in option_names(key)), *layouts, *folders]
    return _key_values(key)


def _key_values(key: str) -> list[Completion]:
    from dataclasses import MISSING

    from megalaunch.config.keys import schema_keys
    from megalaunch.format.yaml_value import to_yaml
    from megalaunch.schema.build import literal_choices

    known = schema_keys().get(key)
    if known is None:
        return []
    default = known.field.default
    values = [str(choice) for choice in literal_choices(known.annotation)]
    values += ["null"] if known.takes_null else []
    if not values and default is not MISSING and not isinstance(default, tuple):
        values = [str(default)]
    return [Completion(value, "the default" if value == to_yaml(default) else "") for value in values]


def _recipes() -> list[Completion]:
    from megalaunch.config.recipes import read_summary, recipe_files

    return [Completion(name, read_summary(path)) for name, path in recipe_files().items()]


def _model_folders(typed: str) -> list[Completion]:
    """Return matching folders: one with a config.json as it is, another with a slash to continue."""
    front, slash, name = typed.rpartition("/")
    found = []
    try:
        for path in sorted(Path(front + slash or ".").expanduser().iterdir()):
            hidden = path.name.startswith(".") and not name.startswith(".")
            if hidden or not path.name.startswith(name) or not path.is_dir():
                continue
            if (path / "config.json").is_file():
                found.append(Completion(f"{front}{slash}{path.name}", "a Hugging Face folder"))
            elif slash:
                found.append(Completion(f"{front}{slash}{path.name}/", "a folder"))
    except (OSError, ValueError, RuntimeError):  # no such folder, or no such home
        return []
    if len(found) == 1 and found[0].text.endswith("/"):
        return [found[0], *_model_folders(found[0].text)]
    return found


def _layouts(typed: str) -> list[str]:
    """Return layout names that extend the complete parts of `typed` by one: `tp4`, then `tp4pp2`, `tp4zero3`, ..."""
    from megalaunch.config.parallel_names import ParallelNameError, layout_values

    complete_parts = typed if typed and layout_values(typed) else re.sub(r"[a-z]+$", "", typed)
    names = []
    for part in _LAYOUT_PARTS:
        try:
            if layout_values(complete_parts + part):
                names.append(complete_parts + part)
        except ParallelNameError:
            continue
    return names


def _takes_value(command: str, option: str) -> bool:
    """Return True for an option with a value (`--devices 8`), False for a flag."""
    from megalaunch.cli.app import load_command

    for parameter in load_command(command).params:
        if option in parameter.opts:
            return not getattr(parameter, "is_flag", False)
    return False


def _matching(found: Iterable[Completion], incomplete: str) -> list[Completion]:
    """Return the candidates that start as typed, without those that a shell would interpret, such as $(...)."""
    return [
        candidate
        for candidate in found
        if candidate.text.startswith(incomplete) and _HARMLESS.fullmatch(candidate.text)
    ]


def _split(text: str) -> list[str]:
    """Split a line that may end inside a quote."""
    lexer = shlex.shlex(text, posix=True)
    lexer.whitespace_split = True
    lexer.commenters = ""
    words: list[str] = []
    try:
        words.extend(lexer)
    except ValueError:
        words.append(lexer.token)
    return words


def _as_shell(shell: str, found: Sequence[Completion], line: Line) -> str:
    if shell == "bash":
        return "\n".join(candidate.text[len(line.prefix) :] for candidate in found)
    if shell == "zsh":
        if not found:
            return "_files"
        rows = [
            f'"{_zsh(candidate.text)}"' + (f':"{_zsh(candidate.help)}"' if candidate.help else "")
            for candidate in found
        ]
        return "_arguments '*: :((" + "\n".join(rows) + "))'"
    if shell == "fish":
        return "\n".join(candidate.text + (f"\t{candidate.help}" if candidate.help else "") for candidate in found)
    return "\n".join(f"{candidate.text}:::{candidate.help or ' '}" for candidate in found)


def _zsh(text: str) -> str:
    """Escape text for a quoted argument of zsh's _arguments."""
    return re.sub(r"([\"$`])", r"\\\1", text.replace("\\", "").replace("'", "''")).replace(":", r"\\:")
