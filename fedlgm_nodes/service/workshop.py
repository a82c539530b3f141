"""The objects that a node builds for the works that are requested from it.

    names and options -> mechanism, task, settings, layers -> trainer

Every error becomes a refusal, because the server chooses the names and options. This module does
not use the node's data.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

import torch

from fedlgm.mechanisms import Mechanism
from fedlgm.planning.layers import LayerTable
from fedlgm.training import LocalTraining, models, tasks
from fedlgm.training.tasks import Task
from fedlgm_nodes.policy import Policy, Refusal
from fedlgm_nodes.protocol.messages import canonical
from fedlgm_nodes.service.work import Work, options_of, refuse_errors

_KEPT = 8  # largest number of works whose objects are stored


@dataclass(frozen=True)
class Job:
    """The objects that a node builds for a work.

    Attributes:
        work: the names and options.
        mechanism: the mechanism.
        task: the task.
        settings: settings of local training.
        layers: the mechanism's view of the model's layers.
    """

    work: Work
    mechanism: Mechanism
    task: Task
    settings: LocalTraining
    layers: LayerTable


class _Unit(Protocol):
    """A unit of protection (see `fedlgm_nodes.service.units`), which makes the trainer of a job."""

    @property
    def name(self) -> str: ...

    def trainer(self, job: Job, module: torch.nn.Module, exact: bool) -> Any: ...


class Workshop:
    """Builds the objects of a node's works. It stores the objects of a few works, and one trainer.

    Args:
        policy: the node's policy.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._jobs: dict[str, Job] = {}
        self._trainer: tuple[tuple[str, str], Any] | None = None

    def job(self, work: Work) -> Job:
        """The objects of a parsed work, which are built if they are not stored.

        Raises:
            Refusal: an option does not exist or does not fit, or the policy does not allow the
                model.
        """
        key = canonical(work.values())
        if key not in self._jobs:
            job = self._build_job(work)
            if len(self._jobs) >= _KEPT:
                self._jobs.clear()
            self._jobs[key] = job
        return self._jobs[key]

    def trainer(self, work: Work, unit: _Unit) -> Any:
        """The work's trainer for a unit of protection.

        A new trainer replaces the previous one, since two large models may not fit into memory.

        Raises:
            Refusal: the model or the mechanism does not suit the unit.
        """
        key = unit.name, canonical(work.values())
        if self._trainer is None or self._trainer[0] != key:
            self._trainer = None
            job = self.job(work)
            with refuse_errors("training"):
                self._trainer = (
                    key,
                    unit.trainer(job, self.module(work), work.is_exact(self._policy)),
                )
        return self._trainer[1]

    def module(self, work: Work) -> torch.nn.Module:
        """The model that a work names, with the weights of the pinned file that it names.

        Raises:
            Refusal: the model cannot be built, or the file is not allowed, is missing, has changed
                or does not fit.
        """
        options, data = options_of(work.model), self._policy.data
        file = (
            self._policy.allow.weights_file(options.pop("weights"))
            if "weights" in options
            else None
        )
        with refuse_errors(f"model {work.model.get('name')!r} cannot be built"):
            module = models.build(
                work.model["name"],
                in_shape=tuple(data.shape),
                classes=data.classes,
                seed=0,
                **options,
            )
        try:
            return module if file is None else models.load_weights_(module, file)
        except Exception as error:  # the error's message holds the path
            raise Refusal(
                "work", "model.weights: the tensors of that file are not those of the model"
            ) from error

    def _build_job(self, work: Work) -> Job:
        allow, settings = self._policy.allow, work.local()
        if settings.epochs > allow.most_epochs:
            raise Refusal(
                "work",
                f"training.epochs = {settings.epochs}; at most {allow.most_epochs} are allowed",
            )
        mechanism = work.built()
        with refuse_errors("task"):
            task = tasks.get(work.task["name"], **options_of(work.task))
        with torch.device("meta"):  # nothing is allocated before the size is known
            module = self.module(work)
        size = sum(parameter.numel() for parameter in module.parameters())
        if size > allow.largest_model:
            raise Refusal("work", f"{size} parameters; at most {allow.largest_model} are allowed")
        with refuse_errors(f"model {work.model.get('name')!r} cannot be built"):
            layers = mechanism.table(LayerTable.from_module(module, work.group_by))
        return Job(work, mechanism, task, settings, layers)
