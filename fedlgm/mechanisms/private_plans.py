"""Interfaces of published variants whose plans depend on unprotected data. NOT PRIVATE.

Such a variant runs a paper's algorithm literally: raw updates determine the bounds, the noise
scales or the choice of layers.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from fedlgm.mechanisms.mechanism import PlansFromPrivateData
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript  # noqa: F401  (the docstring)


class UsesPrivateNorms(PlansFromPrivateData):
    """A published variant whose plan depends on the unprotected layer norms of the cohort. NOT
    PRIVATE.

    Example:
        >>> from fedlgm import Sampling, mechanisms
        >>> mechanism = mechanisms.get("uniform", variant="published", clip="med")
        >>> layers, facts = LayerTable.from_sizes({"a": 3, "b": 2}), RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> plan = mechanism.plan_from_private_norms(layers, facts, np.array([[1.0, 3.0]]))
        >>> isinstance(mechanism, UsesPrivateNorms), plan.clip.tolist(), plan.protected
        (True, [0.25, 0.75], False)
    """

    def plan_from_private_norms(
        self, layers: LayerTable, facts: RunFacts, norms: np.ndarray
    ) -> ReleasePlan:
        """Make the round's plan, an `UnprotectedPlan`, from raw layer norms [clients, K]."""
        raise NotImplementedError


class UsesPrivateSums(UsesPrivateNorms):
    """A published variant whose plan depends on sums of the batch's gradients instead of norms. NOT
    PRIVATE.

    One party must hold all examples, because figures that are computed from parts of a batch cannot
    be combined.

    Example:
        >>> from fedlgm import mechanisms
        >>> mechanism = mechanisms.get("lm-dp-sgd", variant="published", weights="bias")
        >>> isinstance(mechanism, UsesPrivateSums), [round(look.bound, 6) for look in mechanism.looks(layers=2)]
        (True, [1.0, inf])
    """

    def looks(self, layers: int) -> tuple[Scaling, ...]:
        """Return the scalings of examples' gradients whose sums this variant uses, one scaling per
        sum.
        """
        raise NotImplementedError

    def figures(self, layers: LayerTable, sums: Sequence[Tensor], examples: int) -> np.ndarray:
        """Compute the argument `norms` of `plan_from_private_norms`, [rows, K].

        Args:
            layers: the mechanism's table.
            sums: one sum [D] for each of `looks`.
            examples: size of the batch.
        """
        raise NotImplementedError


class UsesPrivateUpdates(PlansFromPrivateData):
    """A published variant in which every client makes a plan from its raw update. NOT PRIVATE.

    Example:
        >>> import torch
        >>> from fedlgm import LocalTraining, Sampling, mechanisms
        >>> budget = {"epsilon": 1.0, "delta": 1e-5, "training": LocalTraining(gradient_clip=1.0)}
        >>> facts = RunFacts(1.0, Sampling("poisson", 10, 1.0), "replace-one", "local", **budget)
        >>> mechanism = mechanisms.get("ladp", variant="published", threshold=1.0)
        >>> plan = mechanism.plan(LayerTable.from_sizes({"a": 3, "b": 2}), facts, Transcript(0, ()))
        >>> update = torch.tensor([1.0, 1.0, 1.0, 0.0, 0.5])
        >>> own, figures = mechanism.plan_from_private_update(plan, update, model=torch.zeros(5))
        >>> isinstance(mechanism, UsesPrivateUpdates), own.protected, figures["selected"].tolist()
        (True, False, [1.0, 0.0])
    """

    def plan_from_private_update(
        self, plan: ReleasePlan, update: Tensor, model: Tensor
    ) -> tuple[ReleasePlan, dict[str, np.ndarray]]:
        """Make the plan of one client.

        Args:
            plan: the round's common plan.
            update: the client's raw update [D].
            model: the global model [D] from which the client started.

        Returns:
            The client's plan, an `UnprotectedPlan`, and figures by name, each [K], which are logged
            as diagnostics.
        """
        raise NotImplementedError
