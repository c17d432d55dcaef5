"""Loggers for TensorBoard, Weights & Biases, MLflow and JSON Lines. All are optional.

In a training loop::

    logger = TensorBoardLogger("runs/tensorboard")
    ...
    if mixer.round_ended is not None:
        logger.round(mixer.round_ended)

The names are those of :mod:`mixwell.training.logging.names`, whatever the tool. A tool is imported when its logger
is made. A module that registers a config section in ``LOGGERS`` adds a logger to the runner.
"""

from mixwell.integrations.loggers.jsonl import JsonlLogger
from mixwell.integrations.loggers.mlflow import MlflowLogger
from mixwell.integrations.loggers.tensorboard import TensorBoardLogger
from mixwell.integrations.loggers.wandb import WandbLogger
from mixwell.training.logging.base import Logger
from mixwell.training.logging.names import named, named_evaluation, named_step, named_weights, portable

__all__ = [
    "JsonlLogger",
    "Logger",
    "MlflowLogger",
    "TensorBoardLogger",
    "WandbLogger",
    "named",
    "named_evaluation",
    "named_step",
    "named_weights",
    "portable",
]
