"""The interface of a task, which defines the loss, the targets and the reported metrics."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar, Literal, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.data.dataset import DataSet
from fedlgm.errors import ConfigError, DataError
from fedlgm.extension.loader import users_code
from fedlgm.training import inputs
from fedlgm.training.devices import keep_modes
from fedlgm.training.tasks.set_metrics import Metric

_PROBED = 2  # number of examples with which the shape of a model's outputs is checked


SUMMED = "; a torch loss returns them with reduction='none'"
"""End of the message for a task whose losses are one number. It says how PyTorch's losses return
one loss per example.
"""


class ExampleLosses(Protocol):
    """The only method of a task that is needed to sum examples' gradients.

    Example:
        >>> from fedlgm.training.example_level.engine import ExampleGradients
        >>> from fedlgm.training.example_level.scaling import of_style
        >>> from fedlgm.planning.layers import LayerTable
        >>> class Squares:
        ...     def losses(self, outputs, y):
        ...         return (outputs[:, 0] - y).square()
        >>> model, losses = nn.Linear(1, 1, bias=False), Squares()
        >>> _ = nn.init.ones_(model.weight)
        >>> x, y = torch.tensor([[1.0], [2.0]]), torch.tensor([0.0, 0.0])
        >>> gradients = ExampleGradients(model, LayerTable.from_module(model), losses)
        >>> gradients.sum(x, y, of_style("flat", 3.0, 1)).total.round()  # 2 and 8, the latter cut to 3
        tensor([5.])
    """

    def losses(self, outputs: Any, y: Any) -> Tensor:
        """Compute the loss of each example [n]."""


class Task(ABC):
    """Defines what a model is trained for: the loss, the targets and the metrics. A subclass must
    define only `losses`; the other methods have defaults that suit most losses.

    Losses are computed under `torch.func` transforms. Therefore `losses` must use only tensor
    operations: it must not branch on values, call `.item()` or change its arguments in place.

    Attributes:
        name: name of the task in reports.
        headline: name of the metric that summarises a run.
        better: whether a "higher" or a "lower" headline is better.

    Example:
        >>> class Absolute(Task):
        ...     def losses(self, outputs, targets):
        ...         return (outputs - targets).abs().mean(dim=1)
        >>> Absolute().loss(torch.tensor([[1.0], [3.0]]), torch.zeros(2, 1)).item()
        2.0
    """

    name: ClassVar[str] = "custom"
    headline: ClassVar[str] = "loss"
    better: ClassVar[Literal["higher", "lower"]] = "lower"

    @abstractmethod
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the loss of each example [n] from outputs [n, ...] and targets [n, ...]. The loss
        of an example must not depend on other examples.
        """

    def loss(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the mean loss of a batch, a scalar that clients minimise."""
        return self.losses(outputs, targets).mean()

    def prepare(self, data: DataSet) -> DataSet:
        """Convert the targets of a data set to the task's type. A data set whose targets already
        have this type is returned unchanged.

        A prepared example must depend only on the original example and on public constants. If it
        depended on a statistic of the training examples, such as their mean, one training example
        would change all others, and no privacy bound would cover this change. Runs refuse a user's
        task that uses such a statistic.

        Raises:
            DataError: the targets do not fit the task; the message names a task that fits.
        """
        train, test = (
            self.targets(y, part) for part, y in (("training", data.train_y), ("test", data.test_y))
        )
        if train is data.train_y and test is data.test_y:
            return data
        return replace(data, train_y=train, test_y=test)

    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        """Convert targets [n, ...] to the task's type. Targets that already have this type are
        returned unchanged. `prepare` raises the same errors.

        Args:
            y: targets of the data set.
            part: "training" or "test", for error messages.

        Raises:
            DataError: the targets do not fit the task.
        """
        require_finite(y, part)
        return y

    def labels(self, y: np.ndarray) -> bool:
        """Whether the task turns these targets into integer labels [n], by which a data set can be
        divided among clients.

        Args:
            y: targets of the data set; only their shape and type matter.
        """
        return y.ndim == 1 and np.issubdtype(y.dtype, np.integer)

    def outputs(self, data: DataSet) -> int | None:
        """Number of outputs per example that a model must have for this data set; None if the data
        set does not determine this number.
        """
        return data.classes

    def check(self, module: nn.Module, data: DataSet) -> None:
        """Refuse a model if its outputs for two test examples do not suit the task, or if the task
        cannot report its metrics for them.

        Integer inputs are treated as tokens. The model must also accept the rows that contain the
        smallest or the largest token of the training or test data.

        Raises:
            ConfigError: the model refuses the inputs or returns unsuitable outputs, the task's loss
                has no gradient, or the task's metrics lack "loss" or the headline.
        """
        count = min(_PROBED, len(data.test_y))
        x, y = (
            inputs.tensors(inputs.take(data.test_x, slice(count))),
            torch.from_numpy(data.test_y[:count]),
        )
        device = next((p.device for p in module.parameters()), torch.device("cpu"))
        with torch.no_grad():
            shapes = inputs.each(
                lambda part: (str(part.dtype).removeprefix("torch."), tuple(part.shape)), x
            )
            has_integers = any(part.dtype == torch.int64 for part in inputs.parts(x))
            tokens = "tokens, below the model's vocabulary and in rows within its length; other inputs are floats"
            hint = f" (integers are {tokens}, such as x / 255)" if has_integers else ""
            with keep_modes(module):
                label = f"the model does not take a batch of the data {data.name!r}, {shapes}{hint}"
                # `check_outputs` may examine the operation that computed the outputs.
                with users_code(label, module), torch.enable_grad():
                    outputs = inputs.call(module.eval(), inputs.to(x, device))
                for part, held in (
                    (("training", data.train_x), ("test", data.test_x)) if has_integers else ()
                ):
                    rows, least, most = _extremes(held)
                    label = f"the model does not take the {part} tokens of {data.name!r}, {least} to {most}"
                    with users_code(label, module):
                        if rows:
                            inputs.call(
                                module, inputs.to(inputs.tensors(inputs.take(held, rows)), device)
                            )
            if not isinstance(outputs, Tensor):
                raise ConfigError(
                    f"the model must return one tensor, but it returns {type(outputs).__name__}: "
                    "wrap it in a module that returns the tensor on which the loss is computed"
                )
            self.check_outputs(outputs, y.to(device), data)
        self._check_figures(outputs.detach(), y.to(device))

    def check_outputs(self, outputs: Tensor, targets: Tensor, data: DataSet) -> None:
        """Refuse a model's outputs [n, ...] that the task cannot compare with targets [n, ...].

        Raises:
            ConfigError: the losses cannot be computed, or there is not one loss per example.
        """
        with users_code(self._no_fit(outputs, targets), self):
            losses = self.losses(outputs, targets)
        shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
        if shape != (len(targets),):
            raise ConfigError(
                f"{self._no_fit(outputs, targets)}: its losses must have shape ({len(targets)},), "
                f"one per example, but they have {shape}{SUMMED if shape == () else ''}"
            )

    def _check_figures(self, outputs: Tensor, targets: Tensor) -> None:
        """Refuse a task with an invalid `better`, with a loss that has no gradient, or with metrics
        that lack "loss" or the headline.
        """
        label = f"task {self.name!r}"
        if self.better not in ("higher", "lower"):
            raise ConfigError(
                f"{label}: better must be 'higher' or 'lower', but it is {self.better!r}"
            )
        with users_code(f"{label}: its figures cannot be computed", self):
            learnt = self.loss(outputs.clone().requires_grad_(), targets).requires_grad
            figures = metrics_of(self, [(outputs, targets)])
        if not learnt:
            raise ConfigError(
                f"{label}: its loss has no gradient with respect to the outputs: is something "
                "detached, or is this called under torch.no_grad() or torch.inference_mode()?"
            )
        names = [*figures, *self.set_metrics()]
        for name in ("loss", self.headline):
            if name not in names:
                raise ConfigError(
                    f"{label}: its metrics must hold {name!r}, but they are "
                    f"{', '.join(map(repr, names))}"
                )

    def sums(self, outputs: Tensor, targets: Tensor) -> dict[str, Tensor]:
        """Compute the sums over a batch from which `metrics` computes the metrics, by name. The
        sums must include "loss".
        """
        return {"loss": self.losses(outputs, targets).sum()}

    def count(self, targets: Tensor) -> int:
        """Number of terms in each of a batch's `sums`: the number of examples, or the total number
        of labels if an example has several labels.
        """
        return len(targets)

    def metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Compute the reported metrics from the totals of `sums` over the whole set, each divided
        by the number of its terms.
        """
        return means

    def set_metrics(self) -> Mapping[str, Metric]:
        """Further metrics by name, which are not means over examples. Each is a function of the
        outputs [n, ...] and the targets [n, ...] of the whole set.

        Example:
            >>> from sklearn.metrics import roc_auc_score
            >>> class Ranked(Task):
            ...     headline, better = "auc", "higher"
            ...     def losses(self, outputs, targets):
            ...         return nn.functional.softplus((1 - 2 * targets) * outputs[:, 0])
            ...     def set_metrics(self):
            ...         return {"auc": lambda outputs, targets: roc_auc_score(targets, outputs[:, 0])}
        """
        return {}

    def gradient_operations(
        self, outputs: Tensor, targets: Tensor, gradient: Tensor
    ) -> list[Callable[[], Any]]:
        """Operations that compute the gradient of the mean loss with respect to the outputs and
        write it to `gradient`.

        At every step, new values are written to `outputs` and `targets`, and then the operations
        are called in order. By default, `torch.func` differentiates the loss. A subclass that
        overrides this method with a formula of the gradient avoids the cost of this.

        Args:
            outputs: [n, ...].
            targets: [n, ...].
            gradient: tensor to which the gradient is written, with the shape of the outputs.
        """
        differentiate = torch.func.grad(self.loss)
        return [lambda: gradient.copy_(differentiate(outputs, targets))]

    def summed_gradient(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Compute the gradient of the sum of the losses with respect to the outputs [n, ...], with
        autograd. The gradient has the shape of the outputs.

        Args:
            outputs: [n, ...].
            targets: [n, ...].
        """
        with torch.enable_grad():
            leaf = outputs.detach().requires_grad_()
            (gradient,) = torch.autograd.grad(self.losses(leaf, targets).sum(), leaf)
        return gradient

    def _no_fit(self, outputs: Tensor, targets: Tensor) -> str:
        shapes = (
            f"outputs of shape {tuple(outputs.shape)} and targets of shape {tuple(targets.shape)}"
        )
        return f"task {self.name!r} does not fit the model's {shapes}"

    def __eq__(self, other: object) -> bool:
        return type(self) is type(other) and vars(self) == vars(other)

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        options = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__name__}({options})"


def metrics_of(task: Task, batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Compute the task's metrics from batches of outputs and targets."""
    sums: dict[str, float] = {}
    count = 0
    for outputs, targets in batches:
        for name, value in task.sums(outputs, targets).items():
            sums[name] = sums.get(name, 0.0) + float(value)
        count += task.count(targets)
    metrics = task.metrics({name: value / max(count, 1) for name, value in sums.items()})
    return {name: float(value) for name, value in metrics.items()}


def require_separate_losses(task: Task | ExampleLosses, outputs: Tensor, targets: Tensor) -> None:
    """Refuse a task whose loss for an example depends on other examples. This check is necessary
    even if privacy protects whole clients, because the batches of unequal clients are padded and
    metrics are means over examples.

    Raises:
        ConfigError: the loss of an example depends on the other examples of its batch, or `loss` is
            not the mean of the losses.
    """
    label = f"task {getattr(task, 'name', type(task).__name__)!r}"
    with users_code(f"{label}: its losses cannot be computed for single examples", task):
        losses = task.losses(outputs, targets)
        alone = torch.cat(
            [task.losses(outputs[i : i + 1], targets[i : i + 1]) for i in range(len(targets))]
        )
    if not inputs.close(losses, alone):
        raise ConfigError(
            f"{label}: the loss of an example depends on the other examples of its batch, which is "
            "not supported: batches of unequal clients are padded"
        )
    if isinstance(task, Task) and not inputs.close(task.loss(outputs, targets), losses.mean()):
        raise ConfigError(
            f"{label}: loss must be the mean of losses, or the trainers would train different "
            "models"
        )


def figures_of(task: Task, batches: list[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Compute the task's metrics from batches of outputs and targets. If the task cannot compute
    these metrics, raise ConfigError.
    """
    with users_code(f"task {task.name!r}: its figures cannot be computed", task):
        return metrics_of(task, batches)


def require_sums(task: Task, outputs: Tensor, targets: Tensor) -> None:
    """Raise ConfigError if a task's metrics depend on how the examples are divided into batches. A
    mean of the batches' AUCs would depend on this.
    """
    label = f"task {task.name!r}"
    figures = figures_of(task, [(outputs, targets)])
    parts = figures_of(task, [(outputs[:1], targets[:1]), (outputs[1:], targets[1:])])
    for name, value in figures.items():
        if np.isfinite(value) and not np.isclose(
            value, parts[name], rtol=inputs.RELATIVE, atol=inputs.ABSOLUTE
        ):
            raise ConfigError(
                f"{label}: metric {name!r} is {value:.6g} over one batch and {parts[name]:.6g} "
                "over two batches of the same examples: `sums` must return sums over examples, "
                "and `count` the number of their terms; a figure of the whole set, such as AUC, "
                "is not such a mean: return it from `set_metrics`"
            )


def require_finite(y: np.ndarray, part: str) -> None:
    """Raise DataError if targets contain NaN or infinity. The message gives the number of such
    targets and the position of the first.

    Example:
        >>> require_finite(np.array([1.0, np.nan]), "training")
        Traceback (most recent call last):
            ...
        fedlgm.errors.DataError: 1 of the training targets are NaN or infinite, the first at index (1,): ...
    """
    if np.issubdtype(y.dtype, np.floating) and not (finite := np.isfinite(y)).all():
        where = np.argwhere(~finite)
        raise DataError(
            f"{len(where)} of the {part} targets are NaN or infinite, the first at index "
            f"{tuple(where[0].tolist())}: remove or replace those examples"
        )


def _extremes(x: inputs.Arrays) -> tuple[list[int], int, int]:
    """Find the rows that contain the smallest and the largest integer of the inputs. Return the
    numbers of these rows and the two integers.
    """
    flat = [part.reshape(len(part), -1) for part in inputs.parts(x) if part.dtype == np.int64]
    held = [part for part in flat if part.size]
    rows = {int(find(part)) // part.shape[1] for part in held for find in (np.argmin, np.argmax)}
    least, most = (
        min((part.min() for part in held), default=0),
        max((part.max() for part in held), default=0),
    )
    return sorted(rows), int(least), int(most)
