"""Lower bounds on epsilon against each adversary if every node adds a share of the noise: the
server, and the readers of released models.

The noise is measured in sums that the library's public functions release. The audit therefore
notices if too few nodes add noise, or if each node adds too little. The distance between
neighbouring sums is the distance that the probe measured.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
import torch

from fedlgm import privacy
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.trust import Adversary
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR
from fedlgm_lab.audits.result import AdversaryRow
from fedlgm_lab.audits.subject import Subject

_NUMBERS = 20_000
"""Least number of noise values that are measured. So many values determine the standard deviation
to within about 2 % at confidence 0.999.
"""


def by_adversary(
    subject: Subject, plan: ReleasePlan, ratio: float, confidence: float
) -> Iterator[AdversaryRow]:
    """Yield a row for each adversary; no rows if the guarantee has a single adversary.

    Args:
        subject: what to audit.
        plan: the first round's plan.
        ratio: largest distance between neighbouring sums, as the probe found it, divided by the
            distance that the accountant assumes.
        confidence: probability with which the bounds of all rows hold together.
    """
    adversaries = subject.facts.noised_by.adversaries(subject.facts)
    for adversary in adversaries:
        noise = _most_noise(plan, adversary, (1 - confidence) / len(adversaries), subject.seed)
        moved = SENSITIVITY_FACTOR[plan.facts.relation] * ratio
        event = privacy.events.gaussian_event(
            plan.effective_multiplier * noise / moved, adversary.rate
        )
        lower = privacy.composed_epsilon([(event, subject.facts.releases)], subject.delta)
        yield AdversaryRow(adversary.name, adversary.nodes, lower, adversary.epsilon)


def _most_noise(plan: ReleasePlan, adversary: Adversary, level: float, seed: int) -> float:
    """Bound from above the standard deviation of the noise that an adversary faces, divided by the
    planned standard deviation.

    The bound follows from the chi-square law of the sum of squares of the measured noise.
    """
    import scipy.stats

    nothing, squares = torch.zeros(plan.size, dtype=torch.float64), 0.0
    keys, count = (
        KeyRing.from_seed(seed).derive(b"noise of shares"),
        math.ceil(_NUMBERS / plan.size),
    )
    for number in range(1, count + 1):
        noise = adversary.released(nothing, plan, keys, number).numpy() / plan.scales
        squares += float(np.sum(noise**2))
    return math.sqrt(squares / float(scipy.stats.chi2.ppf(level, count * plan.size)))
