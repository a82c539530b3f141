"""The gradients of a step as one CUDA graph, so that a GPU gets all kernels of the step in a single
launch.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_flatten, tree_unflatten

_WARM_UP = (
    3  # calls before the recording, in which libraries choose kernels and allocate their workspaces
)


class Recorded:
    """Calls a function of tensors by replaying the function's kernels. The results have the same
    bits.

    The processor takes longer to launch the hundreds of kernels of a small model's step than the
    GPU takes to run them (docs/results/gpu.md). The graph is for the shapes of the last call; for
    other shapes, a new graph is recorded.

    Args:
        function: a function that launches the same kernels whenever its arguments have the same
            shapes, and that never waits for the device. Its results are tensors, which the next
            call overwrites.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._shapes: list[tuple[torch.Size, torch.dtype]] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """The function's results.

        Raises:
            RuntimeError: the function cannot be recorded; `torch.OutOfMemoryError` if there is too
                little memory for the recording.
        """
        given, structure = tree_flatten(arguments)
        shapes = [(tensor.shape, tensor.dtype) for tensor in given]
        if shapes != self._shapes:
            self._shapes = None
            self._record(given, structure)
            self._shapes = shapes
        for tensor, value in zip(self._given, given, strict=True):
            tensor.copy_(value)
        self._graph.replay()
        return self._results

    def _record(self, given: list[Tensor], structure: Any) -> None:
        self._graph, self._results = torch.cuda.CUDAGraph(), None  # frees the earlier graph
        self._given = [tensor.clone() for tensor in given]
        arguments = tree_unflatten(self._given, structure)
        aside = torch.cuda.Stream(self._given[0].device)
        aside.wait_stream(torch.cuda.current_stream(aside.device))
        with torch.cuda.stream(aside):
            for _ in range(_WARM_UP):
                self._function(*arguments)
        torch.cuda.current_stream(aside.device).wait_stream(aside)
        with torch.cuda.graph(self._graph):
            self._results = self._function(*arguments)
