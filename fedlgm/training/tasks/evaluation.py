"""Evaluation of a model: the metrics of its task on data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.planning.layout import laid_out, on_cpu
from fedlgm.training import inputs
from fedlgm.training.inputs import Inputs
from fedlgm.training.tasks.own_figures import RESERVED
from fedlgm.training.tasks.set_metrics import Metric, over_the_set
from fedlgm.training.tasks.task import Task, metrics_of


@torch.no_grad()
def evaluate(
    task: Task,
    module: nn.Module,
    x: Inputs,
    y: Tensor,
    batch_size: int | None = None,
    metrics: Mapping[str, Metric] | None = None,
    *,
    finite: bool = False,
) -> dict[str, float]:
    """Compute the task's metrics, including "loss", of `module` on inputs `x` [n, ...] and targets
    `y` [n, ...], n >= 1.

    The module is left in evaluation mode.

    Args:
        task: the model's task; its `set_metrics` are also computed.
        module: the model.
        x: inputs [n, ...].
        y: targets [n, ...].
        batch_size: number of examples that are evaluated at a time. The default is 128 on a CPU,
            because larger batches do not fit into its cache, and 1000 elsewhere.
        metrics: further metrics by name. Each is a function of the outputs [n, ...] and targets [n,
            ...] of the whole set.
        finite: whether to refuse metrics of the whole set that are NaN or infinite.

    Raises:
        ConfigError: a metric of the whole set fails, or its name is used by another metric or
            reserved for tables.
    """
    set_metrics = {**task.set_metrics(), **(metrics or {})}
    batches: list[tuple[Tensor, Tensor]] = []
    size = batch_size or (128 if on_cpu(module) else 1000)

    def outputs() -> Iterator[tuple[Tensor, Tensor]]:
        for batch, targets in zip(inputs.split(x, size), y.split(size), strict=True):
            predictions = inputs.call(module, batch)
            if set_metrics:
                batches.append((predictions.cpu(), targets))
            yield predictions, targets

    module.eval()
    with laid_out(module, x):
        figures = metrics_of(task, outputs())
    taken = sorted(set_metrics.keys() & {*figures, *RESERVED})
    if taken:
        raise ConfigError(
            f"metric {taken[0]!r}: task {task.name!r} or the run reports one of that name: give it "
            "another name"
        )
    return figures | over_the_set(set_metrics, batches, finite=finite) if set_metrics else figures
