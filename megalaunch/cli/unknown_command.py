"""What to type in place of a command that does not exist."""

from __future__ import annotations

import shlex
from collections.abc import Sequence

_OTHER_NAMES = {
    "--version": ("version",),
    "evaluate": ("eval",),
    "generate": ("chat", "infer", "inference", "sample"),
    "import-megatron": ("import",),
    "preprocess": ("prepare", "tokenize"),
    "train": ("fit", "finetune", "launch", "pretrain", "resume", "run", "start"),
    "validate-config": ("check", "lint", "validate"),
    "watch": ("attach", "status"),
}
"""Names that other programs give to what a command here does."""


def next_step(arguments: Sequence[str], commands: Sequence[str]) -> str:
    """One sentence: the nearest command line, or where the commands are listed.

    >>> next_step(["trian", "recipe=tiny"], ["train", "plan"])
    "Did you mean 'megalaunch train recipe=tiny'?"
    """
    recipe = _recipe_argument(arguments[0])
    wanted = ["train", recipe] if recipe else [_command_for(arguments[0], commands)]
    if wanted[0] is not None:
        return f"Did you mean '{shlex.join(['megalaunch', *wanted, *arguments[1:]])}'?"
    return "'megalaunch --help' lists the commands."


def _command_for(name: str, commands: Sequence[str]) -> str | None:
    import difflib

    for command, others in _OTHER_NAMES.items():
        if name.lower() in others:
            return command
    near = difflib.get_close_matches(name.lower().replace("_", "-"), commands, n=1)
    return near[0] if near else None


def _recipe_argument(word: str) -> str | None:
    """What `train` takes for a word typed in its place: `recipe=tiny`, tiny or tiny.yaml."""
    from megalaunch.config.recipes import is_path, recipe_files

    if "=" in word:
        return word
    return f"recipe={word}" if is_path(word) or word in recipe_files() else None
