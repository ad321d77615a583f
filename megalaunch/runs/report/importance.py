"""Which settings decide the result of several runs: those that vary on their own, their axes, and their importance."""

from __future__ import annotations

import math
import warnings
from collections.abc import Container, Sequence
from typing import Any

from megalaunch.plan.findings import as_override

FEWEST_RUNS = 8
"""Below this number of runs no importance is estimated."""


def axis_places(values: Sequence[Any]) -> tuple[list[float], list[tuple[float, str]]]:
    """Return the place of each value on an axis from 0 to 1, and the ticks: (place, label).

    Numbers are placed by value, on a logarithmic scale if they are positive and span a factor of 20; other values in
    order of their text, evenly.
    """
    if all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values):
        low, high = min(values), max(values)
        logarithmic = low > 0 and high / low >= 20
        scale = math.log if logarithmic else float
        spread = (scale(high) - scale(low)) or 1.0
        distinct = sorted(set(values))
        shown = distinct if len(distinct) <= 6 else [distinct[0], distinct[len(distinct) // 2], distinct[-1]]
        places = [(scale(value) - scale(low)) / spread for value in values]
        return places, [((scale(value) - scale(low)) / spread, f"{value:g}") for value in shown]
    texts = [as_override(value) for value in values]
    order = sorted(set(texts))
    last = max(1, len(order) - 1)
    return [order.index(text) / last for text in texts], [(index / last, text) for index, text in enumerate(order)]


def independent_settings(
    settings: Sequence[tuple[str, Sequence[Any]]], typed: Container[str]
) -> list[tuple[str, Sequence[Any]]]:
    """Return the settings that vary over the runs, one of those that change together: a typed one if there is one.

    The lowest learning rate follows from the learning rate; their shares in the result cannot be told apart.
    """
    chosen: dict[tuple[int, ...], tuple[str, Sequence[Any]]] = {}
    for key, values in settings:
        texts = [as_override(value) for value in values]
        changes = tuple(texts.index(text) for text in texts)
        known = chosen.get(changes)
        if len(set(changes)) > 1 and (known is None or (known[0] not in typed and key in typed)):
            chosen[changes] = (key, values)
    return list(chosen.values())


def setting_importance(
    settings: Sequence[tuple[str, Sequence[Any]]], scores: Sequence[float]
) -> list[tuple[str, float]] | None:
    """Estimate the share of each setting in the differences of the scores (lower is better), the largest first.

    Uses PED-ANOVA (Watanabe et al. 2023) of Optuna, without fitting a model. None with fewer than 8 runs or without
    Optuna.
    """
    if len(scores) < FEWEST_RUNS or not settings:
        return None
    try:
        import optuna
    except ImportError:
        return None
    distributions: dict[str, optuna.distributions.BaseDistribution] = {
        key: optuna.distributions.CategoricalDistribution(sorted({as_override(value) for value in values}))
        if not _are_numbers(values)
        else optuna.distributions.FloatDistribution(float(min(values)), float(max(values)))
        for key, values in settings
    }
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    study = optuna.create_study()
    for index, score in enumerate(scores):
        params = {
            key: float(values[index]) if _are_numbers(values) else as_override(values[index])
            for key, values in settings
        }
        study.add_trial(optuna.trial.create_trial(params=params, distributions=distributions, value=score))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        evaluator = optuna.importance.PedAnovaImportanceEvaluator()
        found = optuna.importance.get_param_importances(study, evaluator=evaluator)
    return list(found.items())


def _are_numbers(values: Sequence[Any]) -> bool:
    return all(isinstance(value, (int, float)) and not isinstance(value, bool) for value in values)
