"""Recording of a step's gradients as one CUDA graph, so that all kernels of the step are launched
on the GPU at once.
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
    """Records the CUDA kernels of a function of tensors, and replays them at every call. The
    results have the same bits as those of the function.

    A small model's step launches hundreds of kernels, for which the CPU needs more time than the
    GPU needs to run them (docs/results/gpu.md). A graph is for one set of shapes and dtypes; if a
    call has other shapes or dtypes than the last call, a new graph is recorded.

    Args:
        function: a function that launches the same kernels whenever its arguments have the same
            shapes, and that never waits for the device. The next call overwrites the tensors that
            the last call has returned.
    """

    def __init__(self, function: Callable[..., Any]) -> None:
        self._function = function
        self._shapes: list[tuple[torch.Size, torch.dtype]] | None = None

    def __call__(self, *arguments: Any) -> Any:
        """Compute the function's results.

        Raises:
            RuntimeError: the function cannot be recorded. If there is too little memory for the
                recording, the error is a `torch.OutOfMemoryError`.
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
