"""Options that Hydra applications have: `--config-dir`, `--cfg` and `--info`, for `train` and `validate-config`."""

from __future__ import annotations

from typing import Annotated, Literal

import typer

ConfigDirs = Annotated[
    list[str] | None,
    typer.Option("--config-dir", "-cd", metavar="DIR", help="A folder with further config groups, e.g. DIR/model."),
]
Cfg = Annotated[
    Literal["job", "hydra", "all"] | None,
    typer.Option("--cfg", "-c", help="Print the composed config as Hydra has it, and stop."),
]
Info = Annotated[
    Literal["all", "defaults", "defaults-tree", "config", "plugins", "searchpath"] | None,
    typer.Option("--info", "-i", help="Print how Hydra composes the config, and stop."),
]


def with_config_dirs(overrides: list[str] | None, folders: list[str] | None) -> list[str]:
    """Return the overrides, with the folders as Hydra's search path: a rerun of the overrides finds them too."""
    if not folders:
        return overrides or []
    from megalaunch.config.hydra.grammar import quoted

    return [*(overrides or []), f"hydra.searchpath=[{', '.join(map(quoted, folders))}]"]


def show_composition(overrides: list[str], cfg: str | None, info: str | None) -> bool:
    """Print what `--cfg` and `--info` ask for; return whether one of them is given."""
    if cfg is None and info is None:
        return False
    from megalaunch.config.compose import with_hydra
    from megalaunch.config.errors import ConfigError
    from megalaunch.config.hydra.api import print_config, print_info
    from megalaunch.plan.report import problems_text
    from megalaunch.runs.errors import refuse

    try:
        if cfg is not None:
            with_hydra(overrides, lambda nodes, texts: print_config(nodes, texts, cfg))
        if info is not None:
            with_hydra(overrides, lambda nodes, texts: print_info(nodes, texts, info))
    except ConfigError as error:
        refuse(problems_text(error.problems))
    return True
