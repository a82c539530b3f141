"""Releases of clients that plan for themselves: from their raw update, as a published variant does,
or from a noisy answer that they have released.
"""

from __future__ import annotations

import hashlib
from dataclasses import replace

import torch
from typing_extensions import override

from fedlgm.aggregation.client_release import Asked, Noised, WholeUpdates
from fedlgm.aggregation.contributions import Updates, raw_updates
from fedlgm.errors import PrivacyError
from fedlgm.mechanisms import Mechanism, PlansFromAnswers, UsesPrivateUpdates
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.plan import ReleasePlan
from fedlgm.training.devices import Numerics

_ROUNDING = 1 + 1e-6


class PlanningClients(WholeUpdates):
    """Contributions of whole clients, which may have plans of their own under local trust.

    Args:
        mechanism: the run's mechanism, which makes these plans; None if clients follow the round's.
        numerics: see `Contributions`.
    """

    def __init__(self, mechanism: Mechanism | None, numerics: Numerics | None = None) -> None:
        super().__init__(numerics)
        self._mechanism = mechanism

    @override
    def release(self, client: int, update: Updates | None, asked: Asked, noise: KeyRing) -> Noised:
        """The client's release, by its own plan if the mechanism makes one."""
        if update is not None and isinstance(self._mechanism, UsesPrivateUpdates):
            raw = raw_updates(update)[0].cpu()
            plan, note = self._mechanism.plan_from_private_update(asked.plan, raw, asked.model)
            own = super().release(client, update, asked._replace(plan=plan), noise)
            return replace(own, note=note)
        if isinstance(self._mechanism, PlansFromAnswers):
            return self._release_in_two_steps(self._mechanism, client, update, asked, noise)
        return super().release(client, update, asked, noise)

    def _release_in_two_steps(
        self,
        mechanism: PlansFromAnswers,
        client: int,
        update: Updates | None,
        asked: Asked,
        noise: KeyRing,
    ) -> Noised:
        """The noisy answer, then the layers by the plan that follows from it.

        The layers of the first step stay on the client. The name covers the noise of both steps, so
        a repetition is the same release only if both are.

        Raises:
            PrivacyError: both steps together cost more than the round's plan.
        """
        answered = super().release(client, update, asked, noise)
        answer = answered.total[asked.plan.layers.size :]
        plan = mechanism.plan_from_answer(asked.plan, answer.double().cpu().numpy())
        _check_cost(asked.plan, plan)
        layers = super().release(
            client, update, asked._replace(plan=plan), noise.derive(b"the layers of an own plan")
        )
        name = hashlib.sha256(f"{answered.name} {layers.name}".encode()).hexdigest()[:32]
        return replace(answered, total=torch.cat([plan.expand(layers.total), answer]), name=name)


def _check_cost(common: ReleasePlan, own: ReleasePlan) -> None:
    """Refuse a client's plan that with its answer costs more than the round's plan."""
    answered = sum((noisy.query.bound / noisy.sigma) ** 2 for noisy in common.queries)
    if not own.protected or own.queries or own.layers is not common.layers:
        raise PrivacyError("a client's own plan must be a protected plan of the layers alone")
    if answered + own.effective_multiplier**-2 > common.effective_multiplier**-2 * _ROUNDING:
        raise PrivacyError(
            "a client's own plan and its answer cost more than the round's plan: leave the share "
            "of the answer to it"
        )
