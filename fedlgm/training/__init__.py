"""Local training of clients."""

from fedlgm.training.base import ClientTask, LocalTraining, Trainer
from fedlgm.training.choice import fastest
from fedlgm.training.fedprox import FedProx, VectorizedFedProx
from fedlgm.training.mixed import MixedPrecisionTrainer
from fedlgm.training.native import NativeTrainer, instruction_set
from fedlgm.training.optimizers import FlatOptimizer
from fedlgm.training.scheduled import ScheduledTrainer
from fedlgm.training.sequential import SequentialTrainer
from fedlgm.training.vectorized import VectorizedTrainer

__all__ = [
    "ClientTask",
    "FedProx",
    "FlatOptimizer",
    "LocalTraining",
    "MixedPrecisionTrainer",
    "NativeTrainer",
    "ScheduledTrainer",
    "SequentialTrainer",
    "Trainer",
    "VectorizedFedProx",
    "VectorizedTrainer",
    "fastest",
    "instruction_set",
]
