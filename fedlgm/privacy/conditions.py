"""Conditions of a guarantee in addition to bounds and noise: participation, secrecy, and unproven
assumptions.
"""

from __future__ import annotations

from dataclasses import replace

from fedlgm.noise.draws import Family
from fedlgm.planning import charging
from fedlgm.planning.facts import RunFacts
from fedlgm.privacy.guarantee import Guarantee

_SAMPLED_REPLACE_ONE = (
    "conditional on the composition of sampled releases under replace-one costing no more than "
    "that of the sampled Gaussian mechanism at twice the sensitivity, which is proven for one "
    "release only (docs/guarantees.md, section Replace-one)"
)


def in_a_run(guarantee: Guarantee, facts: RunFacts, family: Family) -> Guarantee:
    """A mechanism's guarantee with the run's relation, trust, unit, conditions on participation,
    and assumptions.

    Args:
        guarantee: the mechanism's guarantee, or a result of this function, which does not change.
        facts: the run's facts.
        family: distribution family of the noise.

    Example:
        >>> from fedlgm.planning.facts import Sampling
        >>> facts = RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> in_a_run(Guarantee("proven", "bounded, then noised"), facts, "gaussian").reason
        'bounded, then noised; who takes part in a round stays secret'
    """
    given = replace(guarantee, relation=facts.relation, trust=facts.trust)
    if facts.sampling.of:
        given = replace(given, unit=facts.sampling.of)
    for needs in (charging.of(facts).needs(given.unit), facts.noised_by.against(facts)):
        if given.status != "none" and needs not in given.reason:
            given = replace(given, reason=f"{given.reason}; {needs}")
    if facts.assumes:
        given = given.conditional_on(facts.assumes)
    if family != "gaussian" or facts.relation != "replace-one" or facts.accounted_rate == 1:
        return given
    return given.conditional_on(_SAMPLED_REPLACE_ONE)
