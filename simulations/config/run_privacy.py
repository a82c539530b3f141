"""The privacy of a run: its facts and method, the first plan and the clients' consent."""

from __future__ import annotations

from functools import cached_property

import numpy as np

from clients import Consent
from fedlgm.data.spent import Spent, division_name
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.method import Method
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from simulations.config.facts import facts_of, published_examples
from simulations.config.fixed_noise import require_noise
from simulations.config.run_model import RunModel
from simulations.config.spent import method_beside
from simulations.config.validation_messages import in_section

_ROUNDING = 1 + 1e-6
_ONE_NODE = "conditional on each person counting at one node, as the nodes' operators have agreed"


class RunPrivacy:
    """Calibrated method, plan and consent of a run, each made on first use.

    Args:
        model: the run's model.
        planned: whether nothing will be trained, so that no file of a bundled set is needed.
    """

    def __init__(self, model: RunModel, planned: bool = False) -> None:
        self.model, self.recipe, self._planned = model, model.recipe, planned

    @cached_property
    def method(self) -> Method:
        """Mechanism, layers and facts, with the noise calibrated so that the run stays within the
        recipe's budget.
        """
        recipe, model, spent = self.recipe, self.model, self.model.data.spent
        conditions = recipe.protects.conditions(model) if model.users_parts else ()
        if recipe.deployment is not None and recipe.deployment.one_node_per_person:
            conditions = (*conditions, _ONE_NODE)
        facts = facts_of(recipe, self._examples).assuming(*conditions)
        if spent is None:
            method = recipe.protects.calibrate(model.mechanism, model.layers, facts)
        else:
            method = self._method_beside(spent, facts)
        require_noise(recipe, method)
        return method

    def _method_beside(self, spent: Spent, facts: RunFacts) -> Method:
        """The method for the part of the budget that the data's statistics leave."""
        model, calibrate = self.model, self.recipe.protects.calibrate
        division = division_name(model.data.partition) if spent.clients else ""

        def make(left: RunFacts) -> Method:
            return calibrate(model.mechanism, model.layers, left)

        return method_beside(spent, facts, make, self.start(), division)

    @property
    def facts(self) -> RunFacts:
        """The run's public facts."""
        return self.method.facts

    @property
    def _examples(self) -> int:
        """Number of training examples of all clients together, if the server adds noise to steps;
        it is then public.
        """
        if not self.recipe.protects.counts_examples(self.recipe):
            return 0
        count = self._published
        return int(self.model.data.sizes.sum()) if count is None else count

    @property
    def _published(self) -> int | None:
        """Number of training examples that a plan takes as published or as the recipe states it;
        None if only the data contain it.
        """
        if not self._planned or self.model.own.data is not None:
            return None
        return published_examples(self.recipe)

    @property
    def stated(self) -> str:
        """A plan's assumptions about data that it has not read; empty if there are none. A run
        checks these assumptions.
        """
        section, examples = self.recipe.data, self._published
        if examples is None or section.train_images is None or self.model.data.present:
            return ""
        return (
            f"{examples:,} training examples, as the recipe states (data.train_images = "
            f"{section.train_images}); no folder was read: a run refuses a "
            "folder with another number"
        )

    def start(self) -> Transcript:
        """The transcript before the first round."""
        return Transcript.start(self.model.initial())

    def first_plan(self) -> ReleasePlan:
        """The first round's plan."""
        method = self.method
        with in_section("mechanism", self.recipe.mechanism.name):
            return method.plan(self.start())

    def check(self) -> ReleasePlan:
        """Refuse a run that may stop early because of its results if all its rounds cost more than
        the stated budget.

        Returns: The first round's plan.

        Raises:
            ConfigError: the mechanism calibrates its noise to another budget.
        """
        plan, facts = self.first_plan(), self.facts
        # With statistics of the data, the budget is kept by design.
        exempt = self.model.data.spent is not None or not plan.protected
        if self.recipe.run.patience is None or exempt:
            return plan
        from fedlgm.privacy.accounting import composed_epsilon  # workers do not need this import

        epsilon, delta = facts.budget()
        cost = composed_epsilon(self.method.events(plan), delta, facts.accountant)
        if not cost <= epsilon * _ROUNDING:
            raise ConfigError(
                "run.patience: a run that stops early has the epsilon of all its rounds, which is "
                f"{cost:.4g} with this mechanism's noise, but privacy.epsilon is {epsilon:g}: raise "
                "it, or leave run.patience out"
            )
        return plan

    def consent(self) -> Consent | None:
        """The consent of clients under local trust."""
        if not self.recipe.noised_by.uploads_released:
            return None
        first = self.first_plan()
        costs = np.sort(self.model.mechanism.costs(self.model.layers, self.facts.rounds))
        # Nobody knows in which rounds a client will be drawn.
        allowance = float(costs[-self.facts.releases :].sum())
        return Consent(self.facts, first.protected, first.family, first.bounded_by, allowance)
