"""Sums of clipped per-example gradients, computed by the compiled kernel, for plain stacks of
layers on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.planning.clipping import Scaling
from fedlgm.planning.layers import LayerTable
from fedlgm.training.example_level.engine import ClippedSum
from fedlgm.training.example_level.norms import norm_of
from fedlgm.training.example_level.rules.rule import all_finite
from fedlgm.training.example_level.scaling import one_by_one
from fedlgm.training.models.built import Built
from fedlgm.training.native import call
from fedlgm.training.native.library import library
from fedlgm.training.native.program import Program
from fedlgm.training.native.trainer import one_array, require_cpu, targets

BLOCK_BYTES = 4 << 20
"""Target for the size in bytes of the per-example gradients of a block, which should fit into the
processor's cache.
"""
BLOCK = 64
"""Largest number of examples in a block."""


class NativeExampleGradients:
    """Computes the same sums as `ExampleGradients`, up to rounding, with the compiled kernel.

    The kernel measures, scales and adds the gradients of a block of examples at a time. Norms and
    sums are in float64. The sum has the same bits for every block size.

    Args:
        module: the model, in float32. It must be a sequence of the layers that `Program.of` lists.
        layers: the model's layer table, with any grouping of parameters into layers.
        task: classification, regression with squared loss, or binary labels.
        weights: the module's parameters in the order of the table, [D]. The vector is read again
            for every sum.

    Raises:
        ConfigError: the device is not the CPU, or the machine has no kernel. If the kernel does not
            support the model or task, the first sum raises the error.

    Example:
        >>> from fedlgm import tasks
        >>> from fedlgm.training.example_level.engine import ExampleGradients
        >>> from fedlgm.training.example_level.scaling import of_style
        >>> from fedlgm.training.native import reason
        >>> model, x, y = nn.Sequential(nn.Linear(2, 3)), torch.randn(8, 2), torch.randint(3, (8,))
        >>> layers, scaling = LayerTable.from_module(model), of_style("flat", 0.1, 1)
        >>> one = ExampleGradients(model, layers, exact_sums=True)
        >>> other = one if reason() else NativeExampleGradients(model, layers, tasks.get(), layers.flatten(model))
        >>> torch.allclose(one.sum(x, y, scaling).total, other.sum(x, y, scaling).total, atol=1e-6)
        True
    """

    def __init__(self, module: nn.Module, layers: LayerTable, task: Any, weights: Tensor) -> None:
        require_cpu(weights.device)
        self._library, self._module, self._layers, self._task = library(), module, layers, task
        self._weights, self._built = weights, Built(module)
        self._none = torch.zeros(0, len(layers), dtype=torch.float64)
        self._known: tuple[tuple[int, ...], Program, call.Examples, int] | None = None

    def sum(self, x: Any, y: Any, scaling: Scaling) -> ClippedSum:
        """Compute the clipped sum of one batch."""
        return self.sums([(x, y)], scaling)[0]

    def sums(self, batches: Iterable[tuple[Any, Any]], scaling: Scaling) -> list[ClippedSum]:
        """Compute the clipped sums of several batches, one after another."""
        self._built.check()  # only once, because it takes as long as some of the sums
        scaling = one_by_one(scaling)
        order = norm_of(scaling).order
        return [self._sum(x, y, scaling, order) for x, y in batches]

    def condition(self, x: Any) -> str:
        """Return an empty condition, because the kernel's layers treat rows independently (see
        `ExampleGradients.condition`).
        """
        return ""

    def _sum(self, x: Any, y: Any, scaling: Scaling, order: int) -> ClippedSum:
        x = one_array(x, y)
        program, examples, most = self._program(tuple(x.shape[1:]))
        rows = y.shape[0]
        if not rows:
            return ClippedSum(torch.zeros(program.parameters, dtype=torch.float64), self._none, 0)
        x, y = x.contiguous(), targets(program, y)
        sums, parts, discarded = examples.sums(), [], 0
        for block in [(x, y)] if rows <= most else zip(x.split(most), y.split(most), strict=True):
            amounts = examples.measure(*block, program.loss, self._weights, order)
            # NumPy's root is rounded correctly. PyTorch may call MKL, and MKL's bits depend on the
            # processor.
            norms = torch.from_numpy(np.sqrt(amounts.numpy())) if order == 2 else amounts
            if all_finite(norms):
                factors = scaling.factors(norms)
            else:
                factors, left_out = _factors(scaling, norms)
                discarded += left_out
            examples.add(factors, sums)
            parts.append(norms)
        norms = parts[0] if rows <= most else torch.cat(parts)
        return ClippedSum(examples.unpack(sums, program.parameters), norms, discarded)

    def _program(self, shape: tuple[int, ...]) -> tuple[Program, call.Examples, int]:
        """Return the program, the kernel's memory and the largest number of examples in a block,
        for inputs of one shape.
        """
        if self._known is None or self._known[0] != shape:
            program = Program.of(self._module, self._layers, shape, self._task)
            _, per_example = call.sizes(self._library, program.ops)
            most = max(1, min(BLOCK, BLOCK_BYTES // (4 * max(per_example, 1))))
            columns = {
                slot.offset: j
                for j, layer in enumerate(self._layers.layers)
                for slot in layer.slots
            }
            pairs = torch.tensor(
                [[columns.get(int(at), 0) for at in op[-2:]] for op in program.ops]
            )
            examples = call.Examples(self._library, program.ops, pairs, len(self._layers), most)
            self._known = shape, program, examples, most
        return self._known[1:]


def _factors(scaling: Scaling, norms: Tensor) -> tuple[Tensor, int]:
    """Compute the factors from the norms [n, K]. The factors are zero for an example with a norm
    that is not finite; the number of such examples is also returned.
    """
    counted = norms.isfinite().all(dim=1, keepdim=True)
    return torch.where(counted, scaling.factors(torch.where(counted, norms, 0.0)), 0.0), int(
        (~counted).sum()
    )
