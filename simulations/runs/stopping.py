"""A public rule for ending a run early, when the headline metric on the public test set has stopped
improving.

The rule reads only released models and public examples, so it is post-processing of the releases.
Omitted rounds release nothing. But the round at which a run stops depends on its releases, so an
epsilon for fewer rounds was not fixed in advance. Composition proves only the bound of all planned
rounds (a privacy filter), which a stopped run reports. Its ledger holds the rounds that were run.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from fedlgm.privacy.attackers import AttackRates, attack_rates
from fedlgm.privacy.guarantee import Guarantee
from fedlgm.privacy.ledger import Ledger
from simulations.config.recipe import Recipe
from simulations.runs.rows import PrivacyFigures, Spending


class StoppedEarly(Exception):
    """Ends a run after a round in which its stopping rule holds."""


@dataclass(frozen=True)
class Patience:
    """Stop after this many evaluations without a better figure.

    Attributes:
        evaluations: number of evaluations, at least 1.
        headline: name of the metric.
        better: whether a "higher" or a "lower" value is better.

    Example:
        >>> rule = Patience(2, "accuracy", "higher")
        >>> rows = [{"metrics": {"accuracy": value}} for value in (0.5, 0.6, 0.6, 0.4)]
        >>> rule.holds(rows[:3]), rule.holds(rows)
        (False, True)
    """

    evaluations: int
    headline: str
    better: str

    def holds(self, rows: Iterable[Mapping[str, Any]]) -> bool:
        """Whether the rule ends a run with these public rows. Rows without an evaluation do not
        count.
        """
        best, since = -math.inf, 0
        for row in rows:
            if "metrics" in row:
                value = float(row["metrics"].get(self.headline, math.nan))
                value = value if self.better == "higher" else -value
                best, since = (value, 0) if value > best else (best, since + 1)
        return since >= self.evaluations


def reported_epsilon(recipe: Recipe, charged: float) -> float:
    """Epsilon of a run whose ledger shows `charged`. If a rule may stop the run, the result is at
    least the epsilon of all planned rounds.
    """
    return charged if recipe.run.patience is None else max(charged, recipe.privacy.epsilon)


def reported_rates(recipe: Recipe, ledger: Ledger) -> AttackRates:
    """Bounds on attacks on one unit of a run. If a rule has stopped the run, the bounds follow from
    the epsilon of all planned rounds.
    """
    if not ended_early(recipe, ledger.rounds()):
        return attack_rates(ledger)
    delta, accountant = recipe.privacy.delta, recipe.privacy.accountant
    epsilon = reported_epsilon(recipe, ledger.epsilon(delta, accountant))
    return AttackRates.of_budget(epsilon, delta)


def privacy_figures(recipe: Recipe, ledger: Ledger, guarantee: Guarantee | None) -> PrivacyFigures:
    """The privacy figures in a run's summary and statement. They follow from recipe and ledger. A
    run that has released nothing has no guarantee.
    """
    privacy, seeded = recipe.privacy, recipe.run.seed is not None
    rates = reported_rates(recipe, ledger)
    return {
        **spending(recipe, ledger),
        "delta": privacy.delta,
        "noise_reproducible": seeded,
        "guarantee": guarantee.sentence(noise_reproducible=seeded) if guarantee else "",
        "guarantee_status": guarantee.status if guarantee else "none",
        "attack_rates": rates.figures(),
        "attack": rates.sentence(recipe.units),
    }


def spending(
    recipe: Recipe, ledger: Ledger, through: int | None = None, abandoned: int = 0
) -> Spending:
    """Epsilon, proven and claimed, as the run reports it; further arguments as in
    `Ledger.epsilon`.
    """
    spent = recipe.privacy.delta, recipe.privacy.accountant, through, abandoned
    return {
        "epsilon": reported_epsilon(recipe, ledger.epsilon(*spent)),
        "claimed_epsilon": reported_epsilon(recipe, ledger.claimed_epsilon(*spent)),
    }


def reported_rounds(recipe: Recipe, made: int) -> int:
    """Number of rounds to which any other epsilon of a run refers. If a rule may stop the run,
    these are all planned rounds.
    """
    return made if recipe.run.patience is None else recipe.federation.rounds


def ended_early(recipe: Recipe, made: int) -> bool:
    """Whether a run with a rule that may stop it made fewer rounds than its stated epsilon
    covers.
    """
    return made < reported_rounds(recipe, made)


def note_on_epsilon(recipe: Recipe, made: int) -> list[str]:
    """The reason why a run states a larger epsilon than its ledger, if its results ended it early;
    otherwise empty.
    """
    if not ended_early(recipe, made):
        return []
    rounds = recipe.federation.rounds
    return [
        (
            f"the run stopped early by its results: its epsilon is that of all {rounds} rounds, "
            f"{recipe.privacy.epsilon:g}"
        )
    ]
