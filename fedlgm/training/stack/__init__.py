"""Gradients of plain stacks of layers on the CPU, without autograd."""

from fedlgm.training.stack.model import Stack

__all__ = ["Stack"]
