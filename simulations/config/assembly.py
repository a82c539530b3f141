"""The objects of a run, built from its recipe. They are the same for every engine and for a
deployment.
"""

from __future__ import annotations

import warnings
from functools import cached_property
from typing import Any

from clients import LayerwiseClient, PartitionedSource
from clients.choice import client_class
from clients.serving import Serving
from fedlgm.errors import Notice
from fedlgm.mechanisms import PlansFromAnswers, UsesPrivateNorms
from fedlgm.noise.keys import KeyRing
from fedlgm.training.devices import torch_threads
from fedlgm.wording import prefix_key
from simulations import tools
from simulations.config.own import Own
from simulations.config.recipe import Recipe
from simulations.config.run_data import Division, RunData
from simulations.config.run_model import RunModel
from simulations.config.run_privacy import RunPrivacy


class Assembly:
    """The data, model and privacy of a run, made on first use.

    Args:
        recipe: the recipe.
        own: a user's objects that replace names in it.
        planned: whether nothing will be trained, so that no file of a bundled set is needed.
        no_kernel: reason why `training.kernel = "auto"` was resolved to PyTorch; None if it was
            not.
        divided: data and division that are used instead of the recipe's, such as a worker's.
        data: class of the data.
        model: class of the model.

    Example:
        >>> from simulations.config.recipe import load
        >>> run = Assembly(load("digits"))
        >>> len(run.data.sizes), len(run.model.layers), run.privacy.facts.rounds
        (500, 2, 100)
    """

    def __init__(
        self,
        recipe: Recipe,
        own: Own | None = None,
        *,
        planned: bool = False,
        no_kernel: str | None = None,
        divided: Division | None = None,
        data: type[RunData] = RunData,
        model: type[RunModel] = RunModel,
    ) -> None:
        self.recipe, self.own, self.no_kernel = recipe, own or Own(), no_kernel
        self.data = data(recipe, self.own, divided)
        self.model = model(self.data)
        self._planned = planned

    @cached_property
    def privacy(self) -> RunPrivacy:
        """Method, first plan and consent."""
        return RunPrivacy(self.model, self._planned)

    def check(self) -> None:
        """Run all checks that need no training. They cover the division, the model and the first
        plan, and whether these and the other settings fit together.

        Raises:
            FedlgmError: the message gives the problem and the remedy.
        """
        self.data.partition  # noqa: B018
        with torch_threads(self.recipe.run.threads):  # the same number of threads as in the run
            module, mechanism = self.model.check(), self.model.mechanism
            plan = self.privacy.check()
            if isinstance(mechanism, PlansFromAnswers):
                warnings.warn(
                    Notice(
                        "rounds report the noise of the common plan; each client spreads its own "
                        "noise differently over the layers, at the same cost"
                    ),
                    stacklevel=2,
                )
            if self.recipe.run.audit and not isinstance(mechanism, UsesPrivateNorms):
                with prefix_key("run.audit"):
                    tools.RunAudit().check(plan)
            self.recipe.protects.check_data(self.model, module)

    def fingerprints(self) -> dict[str, str]:
        """Hash of each of the user's own objects (`Own.fingerprints`)."""
        if not self.own:
            return {}
        return self.own.fingerprints(self.model.module(), self.data.partition)

    def client(self, keys: KeyRing, serves: Serving) -> LayerwiseClient:
        """A client object for the recipe's division of the data.

        Args:
            keys: key ring of the clients.
            serves: clients that it represents.
        """
        model, source = self.model, PartitionedSource(*self.data.division)
        work = self.recipe.protects.work(model, source)
        options: dict[str, Any] = {"consent": self.privacy.consent(), "numerics": model.numerics}
        kind = client_class(model.mechanism)
        return kind(work, model.mechanism, model.layers, keys, serves, **options)
