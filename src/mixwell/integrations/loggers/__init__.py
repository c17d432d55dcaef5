"""Where the numbers of training go: TensorBoard, Weights & Biases, MLflow, JSON Lines. All are optional.

In a loop of one's own::

    logger = TensorBoardLogger("runs/tensorboard")
    ...
    if mixer.round_ended is not None:
        logger.round(mixer.round_ended)

The names are those of :mod:`mixwell.training.loggers.names`, whatever the tool. A tool is imported when
its logger is made.
"""

from mixwell.integrations.loggers.mlflow import MlflowLogger
from mixwell.integrations.loggers.tensorboard import TensorBoardLogger
from mixwell.integrations.loggers.wandb import WandbLogger
from mixwell.training.loggers.base import Logger
from mixwell.training.loggers.jsonl import JsonlLogger
from mixwell.training.loggers.names import named, named_evaluation, named_step, named_weights, portable

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
