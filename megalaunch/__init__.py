"""megalaunch: train large language models with Megatron-style parallelism from declarative recipes.

The names of `__all__`, and those of `megalaunch.nn`, are the public API (docs/library.md); all other modules are
internal. Names are imported when they are first used, so that `import megalaunch` imports neither torch nor Hydra.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any

from megalaunch.version import __version__ as __version__

if TYPE_CHECKING:
    from megalaunch.config.errors import ConfigError as ConfigError
    from megalaunch.data.errors import DataError as DataError
    from megalaunch.data.samples.build_datasets import build_train_dataset as build_train_dataset
    from megalaunch.data.samples.build_datasets import build_valid_dataset as build_valid_dataset
    from megalaunch.data.samples.sample import Dataset as Dataset
    from megalaunch.data.samples.sample import Sample as Sample
    from megalaunch.data.samples.validation_dataset import FiniteDataset as FiniteDataset
    from megalaunch.engine.api import deep_plan as deep_plan
    from megalaunch.engine.api import export_huggingface as export_huggingface
    from megalaunch.engine.api import generate as generate
    from megalaunch.engine.api import import_huggingface as import_huggingface
    from megalaunch.engine.checkpoint.errors import CheckpointError as CheckpointError
    from megalaunch.engine.inference.sampling import Sampling as Sampling
    from megalaunch.engine.library.batches import make_batch as make_batch
    from megalaunch.engine.library.batches import make_data_loader as make_data_loader
    from megalaunch.engine.library.checkpoints import load as load
    from megalaunch.engine.library.checkpoints import load_pretrained as load_pretrained
    from megalaunch.engine.library.checkpoints import save as save
    from megalaunch.engine.library.initialize import initialize as initialize
    from megalaunch.engine.library.metrics import MetricsWriter as MetricsWriter
    from megalaunch.engine.library.parallelize import parallelize as parallelize
    from megalaunch.engine.library.step import count_tokens as count_tokens
    from megalaunch.engine.library.step import mean_loss as mean_loss
    from megalaunch.engine.library.step import reduce_gradients as reduce_gradients
    from megalaunch.engine.mesh import Mesh as Mesh
    from megalaunch.engine.model.build import build_decoder as build_decoder
    from megalaunch.engine.model.init import init_weights as init_weights
    from megalaunch.engine.model.model_parts import ModelParts as ModelParts
    from megalaunch.engine.optimizer.learning_rate import learning_rate as learning_rate
    from megalaunch.engine.optimizer.optimizer import Optimizer as Optimizer
    from megalaunch.engine.parallel.parallelize import build_sharded_model as build_sharded_model
    from megalaunch.engine.run_end import RunEnd as RunEnd
    from megalaunch.engine.simulate.report import DeepPlan as DeepPlan
    from megalaunch.engine.train.bad_steps import BadStep as BadStep
    from megalaunch.engine.train.dataloader import PrefetchingDataLoader as PrefetchingDataLoader
    from megalaunch.engine.train.dataloader import StepBatch as StepBatch
    from megalaunch.engine.train.evaluate import validation_loss as validation_loss
    from megalaunch.engine.train.forward_backward import ForwardBackward as ForwardBackward
    from megalaunch.engine.train.forward_backward import make_forward_backward as make_forward_backward
    from megalaunch.engine.train.grads import clip_divisor as clip_divisor
    from megalaunch.engine.train.progress import TrainProgress as TrainProgress
    from megalaunch.engine.train.train_step import StepResult as StepResult
    from megalaunch.engine.train.train_step import TrainStep as TrainStep
    from megalaunch.hub.name import HubError as HubError
    from megalaunch.plan.check import check as check
    from megalaunch.plan.findings import Finding as Finding
    from megalaunch.plan.prediction import Prediction as Prediction
    from megalaunch.plan.prediction import predict as predict
    from megalaunch.runs.compose_spec import compose as compose
    from megalaunch.runs.compose_spec import prepare_data as prepare_data
    from megalaunch.runs.compose_spec import resolve as resolve
    from megalaunch.schema import RunSpec as RunSpec
    from megalaunch.schema import SpecError as SpecError
    from megalaunch.schema import build_run_spec as build_run_spec
    from megalaunch.schema import with_values as with_values

_MODULES = {
    "BadStep": "engine.train.bad_steps",
    "CheckpointError": "engine.checkpoint.errors",
    "ConfigError": "config.errors",
    "DataError": "data.errors",
    "Dataset": "data.samples.sample",
    "DeepPlan": "engine.simulate.report",
    "Finding": "plan.findings",
    "FiniteDataset": "data.samples.validation_dataset",
    "ForwardBackward": "engine.train.forward_backward",
    "HubError": "hub.name",
    "Mesh": "engine.mesh",
    "MetricsWriter": "engine.library.metrics",
    "ModelParts": "engine.model.model_parts",
    "Optimizer": "engine.optimizer.optimizer",
    "Prediction": "plan.prediction",
    "PrefetchingDataLoader": "engine.train.dataloader",
    "RunEnd": "engine.run_end",
    "RunSpec": "schema",
    "Sample": "data.samples.sample",
    "Sampling": "engine.inference.sampling",
    "SpecError": "schema",
    "StepBatch": "engine.train.dataloader",
    "StepResult": "engine.train.train_step",
    "TrainProgress": "engine.train.progress",
    "TrainStep": "engine.train.train_step",
    "build_decoder": "engine.model.build",
    "build_run_spec": "schema",
    "build_sharded_model": "engine.parallel.parallelize",
    "build_train_dataset": "data.samples.build_datasets",
    "build_valid_dataset": "data.samples.build_datasets",
    "check": "plan.check",
    "clip_divisor": "engine.train.grads",
    "compose": "runs.compose_spec",
    "count_tokens": "engine.library.step",
    "deep_plan": "engine.api",
    "export_huggingface": "engine.api",
    "generate": "engine.api",
    "import_huggingface": "engine.api",
    "init_weights": "engine.model.init",
    "initialize": "engine.library.initialize",
    "learning_rate": "engine.optimizer.learning_rate",
    "load": "engine.library.checkpoints",
    "load_pretrained": "engine.library.checkpoints",
    "make_batch": "engine.library.batches",
    "make_data_loader": "engine.library.batches",
    "make_forward_backward": "engine.train.forward_backward",
    "mean_loss": "engine.library.step",
    "parallelize": "engine.library.parallelize",
    "predict": "plan.prediction",
    "prepare_data": "runs.compose_spec",
    "reduce_gradients": "engine.library.step",
    "resolve": "runs.compose_spec",
    "save": "engine.library.checkpoints",
    "validation_loss": "engine.train.evaluate",
    "with_values": "schema",
}
"""The public names, each with the module below `megalaunch` that defines it."""

__all__ = [
    "__version__",
    *_MODULES,
]


def public_modules() -> Mapping[str, str]:
    """Return the public names, each with the module below `megalaunch` that defines it."""
    return _MODULES


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module 'megalaunch' has no attribute {name!r}")
    return getattr(import_module(f"megalaunch.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *_MODULES})
