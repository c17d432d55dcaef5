"""Where the numbers of training go: TensorBoard, Weights & Biases, MLflow, JSON Lines. All are optional.

In a loop of one's own::

    logger = TensorBoardLogger("runs/tensorboard")
    ...
    if mixer.round_ended is not None:
        logger.round(mixer.round_ended)

The names are those of :mod:`mixwell.loggers.names`, whatever the tool. A tool is imported when its logger is made.
"""

from mixwell.loggers.base import Logger
from mixwell.loggers.jsonl import JsonlLogger
from mixwell.loggers.mlflow import MlflowLogger
from mixwell.loggers.names import named, named_evaluation, named_step, named_weights, portable
from mixwell.loggers.tensorboard import TensorBoardLogger
from mixwell.loggers.wandb import WandbLogger

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
