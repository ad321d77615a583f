"""Select the points of a sweep: the full grid, random points, or points that a TPE sampler proposes."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping
from random import Random
from typing import Any, Literal

from megalaunch.config.search_space import Categorical, Range, Values
from megalaunch.runs.sweep.folder import LOWER_IS_BETTER, Metric

Axes = Mapping[str, Categorical | Range]
_REPEATS = 1000  # repeated draws in a row after which the space counts as exhausted


def grid(axes: Axes) -> Iterator[Values]:
    """Yield every point, the last axis fastest; raises ValueError when an axis is an interval."""
    columns = []
    for key, axis in axes.items():
        if isinstance(axis, Range):
            raise ValueError(f"{key} is an interval; a grid needs a list of values")
        columns.append(axis.values)
    for row in itertools.product(*columns):
        yield dict(zip(axes, row, strict=True))


def random_points(axes: Axes, seed: int) -> Iterator[Values]:
    """Yield random points without repetition; the same for the same seed, so that a sweep can be continued."""
    random = Random(seed)
    seen: set[tuple[str, ...]] = set()
    repeats = 0
    while repeats < _REPEATS:
        row = tuple(axis.draw(random) for axis in axes.values())
        if row in seen:
            repeats += 1
            continue
        seen.add(row)
        repeats = 0
        yield dict(zip(axes, row, strict=True))


class TreeSampler:
    """Proposes points and learns from scores; raises ImportError without optuna.

    It stores nothing on disk: a continued sweep passes it the finished trials again.
    """

    def __init__(self, axes: Axes, metric: Metric, seed: int) -> None:
        import optuna

        optuna.logging.set_verbosity(optuna.logging.ERROR)
        self._optuna: Any = optuna
        self._axes = axes
        direction: Literal["minimize", "maximize"] = "minimize" if metric in LOWER_IS_BETTER else "maximize"
        sampler = optuna.samplers.TPESampler(seed=seed, n_startup_trials=4)
        self._study = optuna.create_study(direction=direction, sampler=sampler)

    def propose(self) -> Values:
        """Return the next point. The sampler forgets it unless its score is passed to `learn`."""
        trial = self._study.ask()
        values = {key: self._suggest(trial, key) for key in self._axes}
        self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return values

    def learn(self, values: Values, score: float | None) -> None:
        """Add the score of a point; None: it cannot run, or failed."""
        states = self._optuna.trial.TrialState
        distributions = {key: self._distribution(key) for key in self._axes}
        parameters = {key: self._parameter(key, value) for key, value in values.items()}
        state = states.FAIL if score is None else states.COMPLETE
        self._study.add_trial(
            self._optuna.trial.create_trial(params=parameters, distributions=distributions, value=score, state=state)
        )

    def _suggest(self, trial: Any, key: str) -> str:
        axis = self._axes[key]
        if not isinstance(axis, Range):
            return str(trial.suggest_categorical(key, list(axis.values)))
        if axis.integer:
            return axis.override(trial.suggest_int(key, int(axis.low), int(axis.high), log=axis.log))
        return axis.override(trial.suggest_float(key, axis.low, axis.high, log=axis.log))

    def _distribution(self, key: str) -> Any:
        axis, kinds = self._axes[key], self._optuna.distributions
        if not isinstance(axis, Range):
            return kinds.CategoricalDistribution(list(axis.values))
        if axis.integer:
            return kinds.IntDistribution(int(axis.low), int(axis.high), log=axis.log)
        return kinds.FloatDistribution(axis.low, axis.high, log=axis.log)

    def _parameter(self, key: str, value: str) -> Any:
        axis = self._axes[key]
        if not isinstance(axis, Range):
            return value
        return int(value) if axis.integer else float(value)
