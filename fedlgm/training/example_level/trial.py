"""A trial of a model and a task on a few examples, for example-level training. The trial finds
mistakes; no privacy proof depends on it.

`fedlgm.training.example_level.separation` prevents examples from influencing each other. The trial
finds models that would not be trained as their author intends: models that keep state or draw
random numbers, models whose rows influence each other, and models whose gradients in this library
differ from autograd's. If rows are not separated by construction, the trial is the only evidence
that the rows do not influence each other, and the guarantee is conditional.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError, FedlgmError, Notice
from fedlgm.extension.trial import check_losses, require_alike
from fedlgm.planning.layers import LayerTable
from fedlgm.training import inputs, models
from fedlgm.training.devices import fork_rng, keep_modes, keep_values
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.example_level.scaling import FlatClip
from fedlgm.training.inputs import Inputs
from fedlgm.training.tasks.task import ExampleLosses, require_separate_losses
from fedlgm.wording import prefix_key

TRIED = 4
"""Number of examples in a trial."""
_BATCH = 32
"""Size of the batch in which a trial repeats its examples. A large batch can reveal a dependence
between rows that a small batch does not show.
"""
_TOLERANCE = 1e-2
"""Tolerated difference between gradients, relative to the clipping bound. Rounding can cause such a
difference if it moves the input of an activation function across a kink. A dependence on other
examples changes gradients far more.
"""
_NEARBY = (1e-3, 1e-2)
"""Factors by which the perturbation of the weights is multiplied. If gradients differ, the
comparison is repeated at weights perturbed with each of these factors in turn.
"""
_LARGEST = 1e4
"""Largest absolute value in a trial's examples. A trial replaces larger values with 0, so that an
extreme value does not make a correct model fail. This number is also one of the factors by which
`_hostile` multiplies rows.
"""
_MANY, _MANY_BYTES = 512, 4 << 20
"""Limits for a large batch of a trial: the number of examples, and the size of the inputs in bytes.
"""
_LEAST = 2.0**-30
"""Smallest norm of a gradient that a trial compares. Smaller gradients may be only the rounding
errors of terms that cancel.
"""
_RELATIVE, _ABSOLUTE = 0.3, 0.1
"""Size of a parameter's perturbation relative to the root mean square of its values, and smallest
size of a perturbation, which applies to parameters that begin at zero.
"""


def try_examples(
    module: nn.Module, layers: LayerTable, task: ExampleLosses, x: Inputs, y: Tensor, owner: Any
) -> None:
    """Refuse a model or task that fails, carries state from one step to the next, or lets examples
    influence each other.

    After the trial, the module's weights, buffers and mode, and the states of PyTorch's random
    generators, are restored.

    Args:
        module: the initial model.
        layers: layer table of the model.
        task: task of the model.
        x: inputs of a few examples [n, ...], on the module's device.
        y: targets [n, ...] of these examples.
        owner: the class that is tested; a message names the line of this class.

    Raises:
        ConfigError: the message names the problem.

    Example:
        >>> class Centred(nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x - x.mean(dim=0))
        >>> from fedlgm import tasks
        >>> model, x, y = Centred(2, 2), torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
        >>> try_examples(model, LayerTable.from_module(model), tasks.get(), x, y, Centred)
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: model: examples influence each other before or in the output, ...
    """

    def sums() -> list[Tensor]:
        results = [gradients.sum(x, y, FlatClip(1.0)) for _ in range(2)]
        # the norms are compared too, because clipping hides differences between norms
        return [torch.cat([each.total, each.norms.flatten().to(each.total)]) for each in results]

    gradients = _gradients(module, layers, task)
    with fork_rng(0, y.device), keep_modes(module):
        with prefix_key("model"):
            # If the inputs' dimensions are wrong, this raises an error that explains them.
            gradients.condition(x)
            models.require_repeatable(module, x)
            models.require_drawing_nothing(module, x)
            require_alike(sums, len(y), owner)
            _require_separate(module, x, gradients.condition(x))
        check_losses(module, task, x, y)
        trial = _Gradients(gradients, module, layers, task)
        trial.compare(x, y)
        with _perturb_weights(module):
            with prefix_key("model"):
                _require_separate(module, x, gradients.condition(x))
            trial.compare(x, y)
            with _accepting_failures():
                unlike = _unlike(x, y)
                with torch.no_grad():
                    require_separate_losses(task, inputs.call(module, unlike[0]), unlike[1])
                trial.compare(*unlike)


def try_step(
    module: nn.Module, layers: LayerTable, task: ExampleLosses, x: Inputs, y: Tensor
) -> None:
    """At the current weights, refuse a model or task whose examples influence each other's
    gradients.

    Args:
        module: the model.
        layers: layer table of the model.
        task: task of the model.
        x: inputs of a few examples [n, ...], on the module's device.
        y: targets [n, ...] of these examples.

    Raises:
        ConfigError: an example's gradient depends on the other examples of its batch.

    Example:
        >>> from fedlgm import tasks
        >>> model, x, y = nn.Linear(2, 2), torch.randn(4, 2), torch.tensor([0, 1, 1, 0])
        >>> try_step(model, LayerTable.from_module(model), tasks.get(), x, y)  # raises no error
    """
    with fork_rng(0, y.device), keep_modes(module):
        _Gradients(_gradients(module, layers, task), module, layers, task).compare(x, y)


def moderate(values: Tensor) -> Tensor:
    """Replace with 0 each value of an example that is NaN, infinite, or so large that float32 may
    overflow in a model.

    Example:
        >>> moderate(torch.tensor([1.0, torch.nan, 1e30])).tolist(), moderate(torch.tensor([70000])).tolist()
        ([1.0, 0.0, 0.0], [70000])
    """
    return (
        torch.where(values.abs() <= _LARGEST, values, 0.0) if values.is_floating_point() else values
    )


def _gradients(module: nn.Module, layers: LayerTable, task: ExampleLosses) -> ExampleGradients:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)  # training repeats this notice
        return ExampleGradients(module, layers, task)


def _require_separate(module: nn.Module, x: Inputs, condition: str) -> None:
    """Refuse a model whose outputs for a row depend on other rows. If a guarantee for the model has
    a condition, the trial also uses large batches and hostile rows.
    """
    models.require_separate(module, x)
    bytes_each = max(1, sum(part[0].nbytes for part in inputs.parts(x)))
    many = max(_BATCH, min(_MANY, _MANY_BYTES // bytes_each)) if condition else _BATCH
    batch = inputs.take(x, torch.arange(many) % len(inputs.parts(x)[0]))
    with _accepting_failures():
        for value in (1.0, _LARGEST, torch.inf, torch.nan) if condition else (1.0,):
            _require_outputs_alone(module, inputs.each(partial(_hostile, value), batch))


def _hostile(factor: float, values: Tensor) -> Tensor:
    """Copy the rows, and multiply the first, the middle and the last row by a factor. Integer rows
    are returned unchanged.
    """
    if not values.is_floating_point():
        return values
    values = values.clone()
    values[[0, len(values) // 2, -1]] *= factor
    return values


@torch.no_grad()
def _require_outputs_alone(module: nn.Module, x: Inputs) -> None:
    """Refuse a model whose outputs for some rows of a batch differ from its outputs for each of
    these rows alone.
    """
    outputs = inputs.call(module.train(), x)
    for i in (0, 1, len(outputs) // 2, len(outputs) - 1):
        if not inputs.close(
            outputs[i : i + 1], inputs.call(module, inputs.take(x, slice(i, i + 1)))
        ):
            raise ConfigError(
                "the model's outputs for an example depend on the other examples of its batch"
            )


class _Gradients:
    """Compares the engine's clipped gradients with autograd's gradients of single examples.

    Args:
        engine: object that computes the engine's gradients.
        module: the model.
        layers: layer table of the model.
        task: task of the model.
    """

    def __init__(
        self, engine: ExampleGradients, module: nn.Module, layers: LayerTable, task: ExampleLosses
    ) -> None:
        self._engine, self._module, self._layers, self._task = engine, module, layers, task

    def compare(self, x: Inputs, y: Tensor) -> None:
        """Refuse a model or task if the engine's gradient of a single example differs from
        autograd's, or if the engine's sum for a batch differs from the sum of the single gradients.

        At some weights, rounding can move the input of an activation function across a kink. If
        gradients differ, the comparison is therefore repeated at nearby weights.
        """
        problem = self._problem(x, y)
        for factor in _NEARBY:
            if problem:
                with _perturb_weights(self._module, factor):
                    problem = self._problem(x, y)
        if problem:
            raise ConfigError(problem)

    def _problem(self, x: Inputs, y: Tensor) -> str | None:
        lengths = torch.linalg.vector_norm(self._engine.sum(x, y, FlatClip(1.0)).norms, dim=1)
        long = lengths[lengths.isfinite() & (lengths > _LEAST)]
        if len(y) < 2 or not len(long):
            return None
        scale = float(long.median())
        scaling = FlatClip(scale / 2)  # this bound clips at least half of the gradients
        rows = [slice(i, i + 1) for i in range(len(y))]
        alone = [self._engine.sum(inputs.take(x, row), y[row], scaling) for row in rows]
        for row, result in zip(rows, alone, strict=True):
            gradient = self._differentiate(inputs.take(x, row), y[row])
            norm = float(gradient.norm())
            clipped = gradient * min(1.0, scaling.bound / norm) if norm > 0 else gradient
            if (
                math.isfinite(norm)
                and float((clipped - result.total).norm()) > _TOLERANCE * scaling.bound
            ):
                return (
                    "the gradient of an example differs from the gradient that PyTorch computes "
                    "for this example alone: the model or the task remembers what it has seen, a "
                    "hook changes gradients, or a function has a backward pass of its own"
                )
        times = max(1, _BATCH // len(y))
        repeated = torch.arange(len(y), device=y.device).repeat(times)
        together = self._engine.sum(inputs.take(x, repeated), y[repeated], scaling)
        norms = torch.cat([result.norms for result in alone]).repeat(times, 1)
        total = times * torch.stack([result.total for result in alone]).sum(dim=0)
        same = torch.allclose(
            together.norms, norms, rtol=_TOLERANCE, atol=_TOLERANCE * scale, equal_nan=True
        )
        apart = float(torch.linalg.vector_norm(together.total - total))
        if not same or apart > _TOLERANCE * scaling.bound * len(repeated):
            return (
                "an example's gradient depends on the other examples of its batch, so clipping "
                "does not bound what one example changes: normalise, weigh and compare within "
                "each example only, in the model's forward pass, in its hooks and in the task's "
                "losses"
            )
        return None

    def _differentiate(self, x: Inputs, y: Tensor) -> Tensor:
        """Compute autograd's gradient for one example [D], in the order of the layer table."""
        parameters = dict(self._module.named_parameters())
        trained = [parameters[slot.name] for slot in self._layers.slots()]
        with torch.enable_grad():
            loss = self._task.losses(inputs.call(self._module, x), y).sum()
            gradients = torch.autograd.grad(loss, trained, allow_unused=True)
        pairs = zip(gradients, trained, strict=True)
        return torch.cat(
            [
                (torch.zeros_like(parameter) if gradient is None else gradient).flatten()
                for gradient, parameter in pairs
            ]
        )


def _unlike(x: Inputs, y: Tensor) -> tuple[Inputs, Tensor]:
    """Change the examples so that they differ in scale and in length (the number of values before
    zeros), even if the given examples are alike. Give the first two examples the same target.
    """
    count = len(y)

    def change(values: Tensor) -> Tensor:
        if values.ndim > 1:
            length, places = values.shape[1], torch.arange(values.shape[1], device=values.device)
            lengths = torch.linspace(length / count, length, count, device=values.device).ceil()
            inside = (places < lengths[:, None]).view(count, length, *[1] * (values.ndim - 2))
            values = torch.where(inside, values, torch.zeros_like(values))
        if not values.is_floating_point():
            return values
        return values * torch.linspace(0.5, 2.0, count).to(values).view(
            count, *[1] * (values.ndim - 1)
        )

    return inputs.each(change, x), torch.cat([y[:1], y[:1], y[2:]])[:count]


@contextmanager
def _accepting_failures() -> Iterator[None]:
    """Ignore all exceptions in the block except `FedlgmError`, because a correct model may fail on
    examples that are unlike its data.
    """
    try:
        yield
    except FedlgmError:
        raise
    except Exception:
        return


@contextmanager
def _perturb_weights(module: nn.Module, factor: float = 1.0) -> Iterator[None]:
    """Perturb a module's trained parameters inside the block, so that none of them is all zeros.
    The original values are restored after the block.

    Args:
        module: the module.
        factor: factor by which the perturbation is multiplied.
    """
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    drawn = torch.Generator().manual_seed(0)
    with keep_values(trained):
        with torch.no_grad():
            for parameter in trained:
                size = max(_RELATIVE * float(parameter.square().mean().sqrt()), _ABSOLUTE)
                noise = torch.randn(parameter.shape, generator=drawn).to(parameter)
                parameter.add_(noise, alpha=factor * size)
        yield
