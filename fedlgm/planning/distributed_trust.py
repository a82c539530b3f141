"""Noise in shares: each node adds a share of the noise, and the server sees only the noisy sum.

The nodes add integer noise (`fedlgm.noise.integer`). In a deployment, the sum stays hidden until it
is complete. A simulation adds plain integers, which gives the same sum.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from fedlgm import privacy
from fedlgm.errors import ConfigError
from fedlgm.libraries import Tensor, torch
from fedlgm.noise.draws import Family, NoiseBackend
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.records import Part, Shares, least_threshold
from fedlgm.planning.trust import NOISED_BY, Adversary, NoisedBy, NoisedByClients
from fedlgm.planning.views import Facts, NoiseSource, Plan, Sum
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Relation

__all__ = ["IntegerShares", "NoisedInShares", "Shares", "least_threshold"]

_TOLERANCE = 1 + 1e-6


@dataclass(frozen=True)
class NoisedInShares(NoisedByClients):
    """The trust model in which each node adds a share of the noise. A single message is not
    private, but a sum of at least `Shares.threshold` messages is.

    Attributes:
        shares: the run's threshold and colluders; None if the object describes the trust model
            without a run.

    Example:
        >>> who = NOISED_BY["distributed"].of(Shares(20, 3))
        >>> who.noises_in_sum(34.0)  # noise variance of 34 nodes, relative to 17 honest nodes
        2.0
    """

    name = "distributed"
    alone = False
    numbers = ("<u4",)
    uncorrelated = "the server sees every round's sum with the shares of that round"
    observed_rounds = "every round's noised sum"
    answers = (
        "conditional",
        "at most max_colluders of the policy's peers share their noise with the server",
    )

    shares: Shares | None = None

    def of(self, shares: Shares | None) -> NoisedBy:
        """The same trust model with the run's shares.

        Raises:
            ConfigError: `shares` is None.
        """
        if shares is None:
            raise ConfigError(
                "trust 'distributed' needs shares: the [distributed] section with its threshold "
                "and colluders"
            )
        return NoisedInShares(shares)

    def noises_in_sum(self, contributors: float) -> float:
        """Number of contributions divided by the number of honest nodes that the run assumes,
        because the shares of these honest nodes together have the variance of the planned noise.
        """
        return contributors / self._shares.honest

    def limit(self, part: Part, family: Family) -> float:
        """Infinite, because nobody sees the length of a contribution in a hidden sum."""
        return math.inf

    def check_facts(self, facts: Facts) -> None:
        """Require a public number of nodes in every round, whole clients as units, and an
        accountant that has a bound.

        Raises:
            ConfigError: the unit is an example, the number of nodes varies, or the accountant is
                not 'rdp'.
        """
        sampling = facts.sampling
        if facts.steps is not None:
            raise ConfigError(
                "trust 'distributed' protects whole clients, with one sum in each round; every "
                "example-level step would be a sum of its own: use privacy.unit = 'client'"
            )
        if sampling.scheme != "fixed" and sampling.rate < 1:
            raise ConfigError(
                "trust 'distributed' needs a public number of nodes in every round: use sampling "
                "'fixed', or rate 1"
            )
        if facts.accountant != "rdp":
            raise ConfigError(
                f"privacy.accountant = {facts.accountant!r}: the cost of integer noise in shares "
                "is proven as a Renyi divergence; set privacy.accountant = 'rdp'"
            )
        self._shares.check(round(sampling.expected))

    def check_plan(self, plan: Plan) -> None:
        """Require Gaussian noise for whole clients, and a grid that is fine enough for it.

        Raises:
            ConfigError: the plan is not private, its noise is not Gaussian, its trainer bounds
                contributions, or the grid is too coarse.
        """
        from fedlgm.noise.integer import IntegerGrid

        if not plan.protected:
            raise ConfigError(
                "trust 'distributed' needs a private plan: encryption hides single updates, not "
                "their sum"
            )
        if plan.family != "gaussian":
            raise ConfigError(
                "trust 'distributed' adds integer noise at a Gaussian's cost, but the plan has "
                f"{plan.family} noise"
            )
        if plan.bounded_by != "aggregator":
            raise ConfigError(
                "trust 'distributed' needs contributions that the sum bounds, but this plan's "
                "trainer bounds other units"
            )
        if plan.size:
            IntegerGrid.of(plan)

    def unmet_condition(self, facts: Facts, min_cohort: int, max_colluders: int) -> str:
        """How the run fails to meet the node's conditions, if it assumes too few colluders or has
        too small a cohort; otherwise empty.
        """
        if self._shares.colluders < max_colluders:
            return (
                f"noise that suffices against {self._shares.colluders} colluders; this node wants "
                f"max_colluders = {max_colluders} or more"
            )
        if round(facts.sampling.expected) < min_cohort:
            return (
                f"rounds of {facts.sampling.expected:g} nodes; this node takes part in sums of "
                f"min_cohort = {min_cohort} or more"
            )
        return ""

    def check_costs(self, name: str, costs: np.ndarray) -> None:
        """Require the same multiplier in all rounds, because the epsilon of readers is computed
        from the facts alone.

        Raises:
            ConfigError: the rounds' costs differ.
        """
        if not np.allclose(costs, 1.0, rtol=1e-9, atol=0.0):
            raise ConfigError(
                f"{name}: trust 'distributed' states the epsilon of readers for the same noise "
                "multiplier in every round; this mechanism's noise changes over the rounds"
            )

    def event(self, multiplier: float, rate: float) -> privacy.DpEvent:
        """Event of one release with noise in shares."""
        return self._shares.law.event(multiplier)

    def calibrate(self, gaussian: float, within: Callable[[float], bool]) -> float:
        """The Gaussian multiplier if it meets the budget, otherwise a slightly larger multiplier
        that does, to a relative accuracy of 1e-6.
        """
        low = high = gaussian
        while not within(high):
            high *= 2
        while high > low * _TOLERANCE:
            middle = math.sqrt(low * high)
            low, high = (low, middle) if within(middle) else (middle, high)
        return high

    def source(self) -> NoiseSource[Plan]:
        """A source that draws the nodes' shares of the noise."""
        return IntegerShares()

    def open_sum(self, total: Sum) -> Tensor:
        """The sum in the model's units. If fewer nodes than the threshold answered, the round is
        void and the sum is zero.
        """
        if total.count < self._shares.threshold:
            return torch.zeros_like(total.total)
        return _open_sum(total.total, total.plan)

    def observe(
        self, exact: Tensor, plan: Plan, keys: KeyRing, round: int, backend: NoiseBackend
    ) -> Tensor:
        """The opened sum of the honest nodes, of which one contributes `exact` with noise and the
        others only noise.
        """
        return self._with_noise_of(self._shares.honest, exact, plan, keys, round, backend)

    def _with_noise_of(
        self,
        nodes: int,
        exact: Tensor,
        plan: Plan,
        keys: KeyRing,
        round: int,
        backend: NoiseBackend = "cpu",
    ) -> Tensor:
        """The opened sum of `nodes` nodes, of which one contributes `exact` with noise and the
        others only noise.
        """
        total, none = torch.zeros(2, plan.size, dtype=torch.float64)
        bound = keys.derive(exact.cpu().numpy().tobytes()) if keys.secret else keys
        for node in range(nodes):
            contribution = none.clone() if node else exact.to(none, copy=True)
            total += self.source().add_(contribution, plan, bound, round, node, backend)
        return _open_sum(total, plan)

    def adversaries(self, facts: Facts) -> tuple[Adversary, ...]:
        """The server and the readers. The server knows who takes part, and knows the noise of its
        colluders. Readers know neither.
        """
        shares, event = (
            self._shares,
            self.event(facts.noise_multiplier / SENSITIVITY_FACTOR[facts.relation], 1.0),
        )
        server = privacy.composed_epsilon([(event, facts.releases)], facts.budget()[1], "rdp")
        readers, rate = self.readers_epsilon(facts, facts.rounds), facts.sampling.rate
        return (
            Adversary(
                "the server",
                shares.honest,
                1.0,
                server,
                partial(self._with_noise_of, shares.honest),
            ),
            Adversary(
                "readers",
                shares.threshold,
                rate,
                readers,
                partial(self._with_noise_of, shares.threshold),
            ),
        )

    def public_figures(self, plan: Plan) -> dict[str, float]:
        """Public figures of the shares and of the integer grid with its noise, by name."""
        from fedlgm.noise.integer import BITS, IntegerGrid

        grid = IntegerGrid.of(plan)
        return {
            "asked": grid.asked,
            "threshold": grid.threshold,
            "colluders": grid.colluders,
            "bits": BITS,
            "bits_needed": grid.bits_needed,
            "grid_units": grid.units,
            "wrap_probability": grid.wrap_probability,
            "noise_over_central": grid.noise_over_central,
        }

    def readers_epsilon(self, facts: Facts, rounds: int) -> float:
        """Epsilon after some rounds against readers of released models who are not nodes.

        Such readers do not see who took part. The releases contain the noise of all nodes that
        answered, which are at least as many as the threshold.
        """
        return _readers_epsilon(
            self._shares,
            facts.noise_multiplier,
            facts.relation,
            facts.budget()[1],
            facts.sampling.rate,
            rounds,
            min(rounds, facts.releases),
        )

    def against(self, facts: Facts) -> str:
        """The adversaries against whom the two epsilons hold, in words. The words include the
        second epsilon, so that the first is never stated alone.
        """
        said = f"against the server with {self._shares.colluders} colluding nodes{self._shares.law.words}"
        if facts.epsilon is None or facts.delta is None or not facts.noise_multiplier > 0:
            return said
        said += f"; for readers of the released models: epsilon {self.readers_epsilon(facts, facts.rounds):.4g}"
        if facts.sampling.rate < 1:
            said += (
                ", if sampled releases compose under replace-one as one of them is proven to cost"
            )
        return said

    @property
    def _shares(self) -> Shares:
        assert self.shares is not None, "the trust model as such has no numbers"
        return self.shares


def _open_sum(total: Tensor, plan: Plan) -> Tensor:
    """Convert a complete sum of words to the model's units."""
    from fedlgm.noise.integer import IntegerGrid, words

    return (
        torch.from_numpy(IntegerGrid.of(plan).to_model_units(words(total.numpy())))
        if plan.size
        else total
    )


@lru_cache(maxsize=256)
def _readers_epsilon(
    shares: Shares,
    noise_multiplier: float,
    relation: Relation,
    delta: float,
    rate: float,
    rounds: int,
    releases: int,
) -> float:
    from fedlgm.privacy import accounting
    from fedlgm.privacy.events import WholeOrdersDpEvent

    if rounds == 0:
        return 0.0
    multiplier = noise_multiplier * math.sqrt(shares.threshold / shares.honest)
    event = shares.law.event(multiplier / SENSITIVITY_FACTOR[relation])
    every = accounting.composed_epsilon([(event, releases)], delta, "rdp")
    # if participations are capped, later draws depend on earlier draws
    if rate == 1 or releases < rounds:
        return every
    # amplification is known only for noise with the divergences of Gaussian noise
    if isinstance(event, WholeOrdersDpEvent):
        return every
    sampled = accounting.epsilon(
        multiplier,
        delta,
        steps=rounds,
        sampling_rate=rate,
        relation=relation,
        accountant="rdp",
    )
    return min(every, sampled)


class IntegerShares:
    """Rounds a client's bounded contribution to whole numbers, and adds the client's share of the
    noise. The numbers are stored as float64.
    """

    def following(self, keys: KeyRing, round: int) -> KeyRing:
        """The same keys, because the noise of one round does not depend on other rounds."""
        return keys

    def add_(
        self,
        total: Tensor,
        plan: Plan,
        ring: KeyRing,
        round: int,
        party: int,
        backend: NoiseBackend,
    ) -> Tensor:
        """Add one party's noise to `total` in place. The noise is drawn on the CPU by every
        backend.

        Raises:
            ConfigError: the sum is in single precision, which cannot hold 32-bit words.
        """
        from fedlgm.noise.integer import IntegerGrid

        if total.dtype != torch.float64:
            raise ConfigError(
                "trust 'distributed' needs sums in double precision: set training.device = 'cpu'"
            )
        if plan.size == 0:
            return total
        streams = [
            ring.numpy_generator(purpose, round, party + 1)
            for purpose in (Purpose.ROUNDING, Purpose.NOISE)
        ]
        share = IntegerGrid.of(plan).share(total.cpu().numpy(), *streams)
        return total.copy_(torch.from_numpy(share))


NOISED_BY["distributed"] = NoisedInShares()
