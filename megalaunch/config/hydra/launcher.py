"""Run jobs by a launcher plug-in of Hydra, such as joblib's: `hydra/launcher=joblib`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hydra._internal.callbacks import Callbacks
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig

from megalaunch.config.hydra.api import PRIMARY, hydra_initialized
from megalaunch.config.hydra.grammar import quoted
from megalaunch.config.hydra.nodes import ConfigNodes


class NumberedTask:
    """Calls a function with the number of Hydra's job, from 0; plug-ins send it to their workers."""

    def __init__(self, function: Callable[[int], Any]) -> None:
        self._function = function

    def __call__(self, config: DictConfig) -> Any:
        """Run the job: Hydra passes its config."""
        return self._function(HydraConfig.get().job.num)


def launch_jobs(
    nodes: ConfigNodes,
    overrides: Sequence[str],
    jobs: Sequence[Sequence[str]],
    function: Callable[[int], Any],
    folder: Path,
) -> None:
    """Let the chosen launcher plug-in call `function` with the number of each job; return when all have ended.

    Args:
        overrides: what the jobs share, in Hydra's grammar; `hydra/launcher=NAME` chooses the plug-in.
        jobs: the further overrides of each job.
        folder: for files of Hydra.

    Raises:
        HydraException: the plug-in is not installed, or its settings are wrong.
    """
    own_settings = [f"hydra.sweep.dir={quoted(str(folder))}", "hydra.output_subdir=null", "hydra/job_logging=none"]
    with hydra_initialized(nodes) as own:
        config = own.compose_config(
            PRIMARY, [*overrides, *own_settings], run_mode=RunMode.MULTIRUN, with_log_configuration=False
        )
        launcher = Plugins.instance().instantiate_launcher(
            hydra_context=HydraContext(config_loader=own.config_loader, callbacks=Callbacks(config)),
            task_function=NumberedTask(function),
            config=config,
        )
        launcher.launch(jobs, initial_job_idx=0)
