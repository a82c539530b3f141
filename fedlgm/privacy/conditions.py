"""What a guarantee rests on beside bounds and noise: who takes part, what stays secret, what is not proven."""

from __future__ import annotations

from dataclasses import replace

from fedlgm.facts import RunFacts
from fedlgm.noise import Family
from fedlgm.privacy.guarantee import Guarantee

_PARTICIPATION = {
    True: "every client is in one of {b} groups for the whole run, and who takes part in a group's round stays secret",
    False: "nobody takes part twice within {b} rounds; who takes part when may be known",
}
"""Of a run whose rounds are not charged one by one, by whether draws amplify it."""
_SECRET = {
    "client": "who takes part in a round stays secret",
    "example": "which examples a round draws stays secret",
    "step": "which of its examples a client's step draws stays secret",
}
"""What amplification by sampling rests on."""
_SAMPLED_REPLACE_ONE = (
    "conditional on the composition of sampled releases under replace-one costing no more than that of the sampled "
    "Gaussian mechanism at twice the sensitivity, which is proven for one release only (docs/guarantees.md, section "
    "Replace-one)"
)


def in_a_run(guarantee: Guarantee, facts: RunFacts, family: Family) -> Guarantee:
    """A mechanism's guarantee in a run's own terms: relation, trust, what it needs of who takes part, its condition.

    Args:
        guarantee: of the mechanism; once in these terms, it stays as it is.
        facts: of the run.
        family: of the noise.

    Example:
        >>> from fedlgm.facts import Sampling
        >>> facts = RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> in_a_run(Guarantee("proven", "bounded, then noised"), facts, "gaussian").reason
        'bounded, then noised; who takes part in a round stays secret'
    """
    given = replace(guarantee, relation=facts.relation, trust=facts.trust)
    amplified = facts.accounted_rate < 1
    needs = ""
    if not facts.separate_rounds:
        needs = _PARTICIPATION[amplified].format(b=facts.sampling.separation)
    elif amplified:
        needs = _SECRET[given.unit] if facts.steps is None else _SECRET["step"]
    if given.status != "none" and needs not in given.reason:
        given = replace(given, reason=f"{given.reason}; {needs}")
    if family != "gaussian" or facts.relation != "replace-one" or not amplified:
        return given
    return given.conditional_on(_SAMPLED_REPLACE_ONE)
