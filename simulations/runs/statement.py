"""The privacy statement of a run: everything that an evaluator asks about its guarantee.

The questions are those of NIST SP 800-226 (2025), "Guidelines for Evaluating Differential Privacy
Guarantees": unit, relation, trust, parameters, composition, what is released, and what lies outside
of the guarantee. All answers follow from the recipe and the ledger, except those of the recipe's
section [statement].
"""

from __future__ import annotations

from collections import Counter

from fedlgm.cache import version_of
from fedlgm.privacy.cost import Cost
from fedlgm.privacy.guarantee import ACCOUNTING, WHO_ADDS_NOISE, Guarantee, Trust
from fedlgm.privacy.ledger import Ledger
from simulations.config.recipe import Recipe
from simulations.runs.rows import Statement
from simulations.runs.stopping import privacy_figures, reported_rates

SCHEMA = 1
GROUPS = (2, 5, 10)
"""Numbers of units, such as the examples of one person, for which a statement has attack rates."""

_MODELS = "the model after every round, and with it the noisy mean of every round"
_RELEASED: dict[Trust, str] = {
    "central": _MODELS,
    "local": f"every client's noisy update, to the server; {_MODELS}",
    "distributed": f"the noisy sum of every round, to the server; {_MODELS}",
}
_OUTSIDE = [
    "the test figures, which are computed from released models on public examples",
    "the initial model and pretrained weights, which are assumed to be public",
    "the numbers of clients and classes, which are assumed to be public",
    "the columns of a table and the names of sites in the report, which are assumed to be public",
    "the choice of the recipe, unless a search is charged",
    "durations, missing answers and participants, which only the operator sees",
]
_FLOATING_POINT = (
    "contributions are summed in float64, and noise is drawn as rounded real numbers; the proof is "
    "for real numbers"
)


def statement_of(
    recipe: Recipe, ledger: Ledger, guarantee: Guarantee, rounds: int, backend: str
) -> Statement:
    """The statement of a run.

    Args:
        recipe: the run's recipe.
        ledger: its ledger.
        guarantee: its guarantee.
        rounds: number of its rounds.
        backend: generator of its noise, such as "cpu".
    """
    privacy, sampling, section = recipe.privacy, recipe.sampling, recipe.statement
    figures, rates = privacy_figures(recipe, ledger, guarantee), reported_rates(recipe, ledger)
    costs = Counter(Cost.of(charge.event) for charge in ledger.charges() if charge.round > 0)
    earlier = sum(charge.round == 0 for charge in ledger.charges())
    statement: Statement = {
        "schema": SCHEMA,
        "unit": recipe.unit,
        "relation": guarantee.relation,
        "trust": guarantee.trust,
        "noise_added_by": WHO_ADDS_NOISE[privacy.trust],
        **figures,  # type: ignore[typeddict-item]
        "groups": {str(count): rates.of_units(count).figures() for count in GROUPS},
        "sampling": sampling.scheme,
        "rate": sampling.rate,
        "population": sampling.population,
        "max_participations": privacy.max_participations,
        "rounds_planned": recipe.federation.rounds,
        "rounds_done": rounds,
        "releases": [
            {"count": count, "noise": cost.noise, "sampling": cost.sampling}
            for cost, count in costs.most_common()
        ],
        "earlier_releases": earlier,
        "accountant": privacy.accountant,
        "accounting": f"{ACCOUNTING[privacy.accountant]} (dp-accounting "
        f"{version_of('dp-accounting')})",
        "released": _RELEASED[privacy.trust],
        "searched": (section and section.searched) or "not declared",
        "outside": _OUTSIDE,
        "noise_generator": f"{'a secret key' if recipe.run.seed is None else 'the public seed'} "
        f"({backend})",
        "floating_point": _FLOATING_POINT,
    }
    if section is not None:
        told = section.model_dump(exclude_none=True, exclude={"searched"})
        statement.update(told)  # type: ignore[typeddict-item]
    return statement
