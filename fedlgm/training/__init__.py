"""Local training of clients."""

from fedlgm.training.base import ClientTask, LocalTraining, Trainer
from fedlgm.training.evaluation import evaluate
from fedlgm.training.sequential import SequentialTrainer

__all__ = ["ClientTask", "LocalTraining", "SequentialTrainer", "Trainer", "evaluate"]
