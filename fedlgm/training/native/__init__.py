"""Training of plain stacks of layers by a compiled kernel, which trains a client in one call."""

from fedlgm.training.native.library import instruction_set, reason
from fedlgm.training.native.program import Program
from fedlgm.training.native.trainer import NativeTrainer

__all__ = ["NativeTrainer", "Program", "instruction_set", "reason"]
