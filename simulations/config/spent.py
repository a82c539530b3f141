"""Runs on data that were processed with privately released statistics, as in a standardisation.
Such a run must pay for this release.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from fedlgm.data.spent import Spent
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms.method import Method
from fedlgm.planning import charging
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript

_RELATION = "add-remove"  # relation under which `simulations.standardise` releases its statistics
_SHARE = 0.1  # share of delta, for the first guess of the remaining budget
_TRIES = 8
_SLACK = 0.01  # share of epsilon that may stay unspent


def method_beside(
    spent: Spent,
    facts: RunFacts,
    make: Callable[[RunFacts], Method],
    start: Transcript,
    division: str,
) -> Method:
    """The method whose rounds stay within the budget of `facts` when composed with `spent`.

    Args:
        spent: cost of releases before the run.
        facts: the run's facts with the whole budget.
        make: function that calibrates a method to the budget of its argument.
        start: the transcript before the first round.
        division: `division_name` of the rows of the run's clients, if clients are the unit of
            `spent`.

    Raises:
        ConfigError: the run protects another unit, its clients hold other data, or it does not
            consist of rounds with noise of a trusted server.
        PrivacyError: no budget is left for the training.
    """
    from fedlgm.privacy.accounting import composed_epsilon  # an import that workers do without

    epsilon, delta = facts.budget()
    if facts.noised_by.uploads_released or charging.of(facts).joint or facts.overlap > 1:
        raise ConfigError(
            "data: their private statistics are charged together with rounds that a trusted "
            "server noises: use privacy.trust = 'central', privacy.noise = 'independent' and "
            "federation.sampling = 'poisson' without federation.overlap, or standardise with "
            "public figures"
        )
    left, best_method = epsilon - spent.epsilon(_SHARE * delta, facts.accountant), None
    for _ in range(_TRIES):
        if not left > 0:
            break
        method = make(replace(facts, epsilon=left, delta=(1 - _SHARE) * delta))
        plan = method.plan(start)
        if plan.protects != spent.protects:
            raise ConfigError(
                f"data: their private statistics protect ({spent.protects}), but the run protects "
                f"({plan.protects}): their epsilons do not add up; {_remedy(plan)}"
            )
        if spent.clients and division != spent.division:
            raise ConfigError(
                f"data: their private statistics protect the {spent.clients} clients that the data "
                "name, but this run's clients hold other data: use data.partition = 'natural', "
                f"federation.clients = {spent.clients} and the users that were passed to "
                "standardise"
            )
        above = (
            composed_epsilon([*spent.events, *method.events(plan)], delta, facts.accountant)
            - epsilon
        )
        if above <= 0:
            best_method = replace(method, facts=replace(method.facts, epsilon=epsilon, delta=delta))
            if above > -_SLACK * epsilon:
                break
        left -= (1.1 if above > 0 else 0.9) * above
    if best_method is not None:
        return best_method
    raise PrivacyError(
        "data: their private statistics cost epsilon = "
        f"{spent.epsilon(delta, facts.accountant):.4g} of privacy.epsilon = {epsilon:g} and leave "
        "too little for the training: raise privacy.epsilon, or standardise with a smaller "
        "epsilon and a new ledger"
    )


def _remedy(plan: ReleasePlan) -> str:
    unit = plan.guarantee.unit
    if plan.facts.relation != _RELATION:
        return f"only runs under {_RELATION} can count statistics (federation.sampling = 'poisson')"
    if plan.facts.sampling.of is not None:
        return "standardise with public figures, or protect clients (privacy.unit = 'client')"
    return f"standardise with unit={unit!r}"
