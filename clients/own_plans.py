"""Releases of clients, each of which plans its layers from a noisy answer that it has released
before.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace

import torch

from fedlgm.aggregation.client_release import Asked, Follow, Noised
from fedlgm.aggregation.contributions import Updates
from fedlgm.errors import PrivacyError
from fedlgm.mechanisms.mechanism import Mechanism, PlansFromAnswers
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.plan import ReleasePlan

_ROUNDING = 1 + 1e-6


@dataclass(frozen=True)
class AnswerFirst:
    """Planner of a client that first releases its noisy answer, and then its layers by the plan
    that follows from this answer.

    The noised layers of the first step stay on the client. The name of the release covers the noise
    of both steps, so a repetition counts as the same release only if both steps are the same.

    Attributes:
        mechanism: makes the client's plan from its answer.
    """

    mechanism: PlansFromAnswers

    def release(
        self, follow: Follow, update: Updates | None, asked: Asked, noise: KeyRing
    ) -> Noised:
        """See `ClientPlanner`.

        Raises:
            PrivacyError: both steps together cost more than the round's plan.
        """
        answered = follow(asked, noise)
        answer = answered.total[asked.plan.layers.size :]
        plan = self.mechanism.plan_from_answer(asked.plan, answer.double().cpu().numpy())
        _check_cost(asked.plan, plan)
        layers = follow(asked._replace(plan=plan), noise.derive(b"the layers of an own plan"))
        name = hashlib.sha256(f"{answered.name} {layers.name}".encode()).hexdigest()[:32]
        return replace(answered, total=torch.cat([plan.expand(layers.total), answer]), name=name)


def answer_first(mechanism: Mechanism) -> AnswerFirst | None:
    """Return the planner with which clients plan from their answers; None if the mechanism does not
    let clients plan from answers.

    Example:
        >>> from fedlgm import mechanisms
        >>> answer_first(mechanisms.get("uniform")) is None
        True
    """
    return AnswerFirst(mechanism) if isinstance(mechanism, PlansFromAnswers) else None


def _check_cost(common: ReleasePlan, own: ReleasePlan) -> None:
    """Refuse a client's plan if the plan and the client's answer together cost more than the
    round's plan.
    """
    answered = sum((noisy.query.bound / noisy.sigma) ** 2 for noisy in common.queries)
    if not own.protected or own.queries or own.layers is not common.layers:
        raise PrivacyError("a client's own plan must be a protected plan of the layers alone")
    if answered + own.effective_multiplier**-2 > common.effective_multiplier**-2 * _ROUNDING:
        raise PrivacyError(
            "a client's own plan and its answer cost more than the round's plan: plan the layers "
            "with less than the round's budget, so that the answer has its share"
        )
