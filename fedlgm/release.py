"""The one door through which anything private leaves: noise exactly as the plan says."""

from __future__ import annotations

import hashlib

from torch import Tensor

from fedlgm.keys import KeyRing, Purpose
from fedlgm.noise import add_noise_
from fedlgm.plan import ReleasePlan
from fedlgm.privacy.ledger import SERVER

__all__ = ["SERVER", "add_downlink_", "fingerprint", "release"]


def release(total: Tensor, plan: ReleasePlan, keys: KeyRing, round: int, party: int = SERVER) -> Tensor:
    """Add the plan's noise to a bounded sum, in place. Charge the ledger with `plan.event` BEFORE calling this.

    Args:
        total: sum of bounded contributions (central trust) or one client's own (local trust), [plan.size].
        plan: the round's plan.
        keys: secret key ring of the noising party.
        round: round number, from 1.
        party: `SERVER`, or the client's number under local trust.

    Returns:
        `total`, now safe to publish to the degree that `plan.guarantee` says.
    """
    layers = [int(j) for j in plan.indices] + [len(plan.layers) + i for i in range(len(plan.sides))]
    streams = [keys.torch(Purpose.NOISE, round, party + 1, layer) for layer in layers]
    return add_noise_(total, [(size, sigma) for _, size, _, sigma in plan.parts], streams, plan.family)


def add_downlink_(mean: Tensor, plan: ReleasePlan, keys: KeyRing, round: int) -> Tensor:
    """Add the plan's broadcast noise to every coordinate of a released mean [plan.size], in place; nothing if it is 0.

    For local trust only, where the server's own streams add no other noise.
    """
    if plan.downlink > 0:
        stream = keys.torch(Purpose.NOISE, round, SERVER + 1)
        add_noise_(mean, [(mean.numel(), plan.downlink)], [stream])
    return mean


def fingerprint(keys: KeyRing, round: int, party: int = SERVER) -> str:
    """Public name of a release's noise key, for the ledger: equal names mean equal noise."""
    words = keys.words(8, Purpose.NOISE, round, party + 1)
    return hashlib.sha256(words.tobytes()).hexdigest()[:32]
