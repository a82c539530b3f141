"""Checks of noise that is drawn for them, in audits without canaries: its scale, and whether releases share it.

Two neighbouring sums are released in several rounds, through the public path. The exact sums are known, so the noise
is, and its mean square (mean magnitude for Laplace noise) has a known law. The signs of two releases' noise agree in
each coordinate with probability 1/2, whatever the law of symmetric, independent noise.
"""

from __future__ import annotations

import itertools
import math

import numpy as np
import scipy.stats

from fedlgm.noise.keys import KeyRing
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.audits.result import Check
from fedlgm_lab.audits.scores import Array
from fedlgm_lab.audits.subject import Subject

SHARE = 1e-3
"""Share of an audit's level that these checks take: the faults that they find are far beyond chance."""
_ROUNDS, _NUMBERS = 4, 4000  # rounds at least, and numbers of noise at least


def drawn_checks(subject: Subject, seed: int | None, level: float) -> tuple[Check, ...]:
    """Both checks; none for releases without a guarantee.

    Args:
        subject: what to audit.
        seed: seed of the noise; None draws it from the operating system.
        level: probability with which noise as planned may fail.

    Example:
        >>> [check.passed for check in drawn_checks(Subject.of("laplace-iid"), 0, level=1e-6)]
        [True, True]
    """
    worlds = next(iter(subject.neighbours(subject.start)))
    plan = worlds[0].plan
    if not plan.protected:
        return ()
    # As that of a real run, whose noise depends on the sum.
    keys = KeyRing(KeyRing.from_seed(seed).derive(b"drawn noise").root, secret=True)
    rounds = max(_ROUNDS, math.ceil(_NUMBERS / (2 * plan.size)))
    drawn = [
        (world.released(keys, round).double() - world.total.double()).numpy()
        for round in range(1, rounds + 1)
        for world in worlds
    ]
    noise = np.stack(drawn) / np.where(plan.scales > 0, plan.scales, 1.0)
    return _scale(noise, plan, level / 2), _repetition(noise, level / 2)


def _scale(noise: Array, plan: ReleasePlan, level: float) -> Check:
    """The mean square or magnitude of each part's noise, over the least that chance allows."""
    least, worst, start = math.inf, "", 0
    for part in plan.parts:
        values, start = noise[:, start : start + part.size], start + part.size
        if part.sigma == 0:
            continue
        if plan.family == "gaussian":
            found, law = float(np.mean(values**2)), scipy.stats.chi2(values.size)
            scale = math.sqrt(found)
        else:
            found, law = float(np.mean(np.abs(values))), scipy.stats.gamma(values.size)
            scale = found
        limit = float(law.ppf(level / len(plan.parts))) / values.size
        if found / limit < least:
            least, worst = found / limit, f"{part.name}: {scale:.4f} of the planned scale"
    return Check("noise scale", least >= 1, f"least in {worst}")


def _repetition(noise: Array, level: float) -> Check:
    """The two releases whose noise agrees in more, or in fewer, signs than any others."""
    signs = np.sign(noise)  # 0 on the grid's own zero, where nothing is compared
    least, agreed = 1.0, 0.5
    for one, other in itertools.combinations(signs, 2):
        product = one * other
        both, alike = int(np.abs(product).sum()), int((product > 0).sum())
        value = float(scipy.stats.binomtest(alike, both).pvalue) if both else 1.0
        if value < least:
            least, agreed = value, alike / both
    pairs = len(noise) * (len(noise) - 1) / 2
    return Check("noise repetition", least >= level / pairs, f"signs of two releases' noise agree in {agreed:.1%}")
