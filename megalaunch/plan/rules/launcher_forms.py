"""The rules of a `launcher` section alone, for commands that have no run spec."""

from __future__ import annotations

from collections.abc import Iterator

from megalaunch.plan.rules.kubernetes import secret_values, wrong_forms
from megalaunch.plan.rules.registry import Violation
from megalaunch.plan.rules.secret_values import secret_texts, wrong_copied
from megalaunch.plan.rules.slurm import wrong_extra, wrong_time
from megalaunch.plan.rules.ssh import wrong_hosts
from megalaunch.schema.launcher import LauncherSpec


def wrong_launcher_settings(settings: LauncherSpec) -> Iterator[Violation]:
    """Yield what has not the form of its key, and what is or holds a secret, in the part of the chosen launcher."""
    yield from secret_texts(settings, "launcher.")
    yield from wrong_copied(settings)
    if settings.name == "slurm":
        yield from (*wrong_time(settings.slurm), *wrong_extra(settings.slurm))
    elif settings.name == "ssh":
        yield from wrong_hosts(settings.ssh)
    elif settings.name == "kubernetes":
        yield from (*wrong_forms(settings.kubernetes), *secret_values(settings.kubernetes))
