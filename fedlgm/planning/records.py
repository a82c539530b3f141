"""Records that facts and plans contain: the sampling, the shares of the noise, and a released
part.
"""

from __future__ import annotations

import numbers
from dataclasses import asdict, dataclass, field
from typing import Any, Literal, NamedTuple

from fedlgm.checks import check_count, check_known, check_rate
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import sealed
from fedlgm.noise import integer_noise
from fedlgm.noise.integer_noise import IntegerNoise
from fedlgm.privacy.guarantee import SharedUnit

Scheme = Literal["poisson", "fixed", "allocation", "cyclic", "min-separation", "grouped-poisson"]
_ROUNDING = 1e-6


@sealed
@dataclass(frozen=True)
class Sampling:
    """Rule that chooses the participants of a round.

    With "poisson" and "fixed" every client may take part in any round. With "allocation" every
    client takes part in exactly `participations` = k secretly drawn rounds of each block of `block`
    rounds, independently of the other clients; a client that does not answer in its round is not
    moved to another round. With the other schemes a client is invited again `separation` = b rounds
    after its last invitation at the earliest, whether or not it answered:

    * "cyclic": every client is assigned to one of b groups for the whole run, independently and at
      random. In round t, counted from 0, all clients of group t mod b take part.
    * "min-separation": `rate * population` of the clients that were not invited in the last b - 1
      rounds take part.
    * "grouped-poisson": clients are assigned to groups as in "cyclic". In each round of its group,
      a client takes part with probability b `rate`.

    Example:
        >>> Sampling("grouped-poisson", 500, 0.1, 4).within_group
        0.4

    Attributes:
        scheme: "poisson" (each client independently with probability `rate`), "fixed"
            (`rate * population` clients without replacement), or one of the schemes above.
        population: number N of registered clients; public.
        rate: expected share q in (0, 1] of the clients in a round.
        separation: number b of rounds for the schemes with a separation; None for all other
            schemes.
        participations: number k of rounds for "allocation"; None for all other schemes.
        block: number of rounds of a block for "allocation", where `rate` is k / block; None for all
            other schemes.
        of: "user" if the participants are users with several clients each; None if the participants
            are clients or examples.

    Raises:
        ConfigError: a number is outside its range, or the population is too small for the
            separation.
    """

    scheme: Scheme
    population: int
    rate: float
    separation: int | None = None
    of: SharedUnit | None = field(default=None, repr=False)
    participations: int | None = None
    block: int | None = None

    def __post_init__(self) -> None:
        check_known("sampling scheme", self.scheme, Scheme)
        if self.of is not None:
            check_known("unit of several clients", self.of, SharedUnit)
        check_count("the population", self.population)
        check_rate(rate=self.rate)
        if (
            self.scheme in ("fixed", "min-separation")
            and abs(self.expected - round(self.expected)) > _ROUNDING
        ):
            # With a rounded cohort, the rate of the sampling would differ from the accounted rate.
            raise ConfigError(
                f"a fixed cohort must be a whole number of clients, got {self.expected:g}"
            )
        if (self.scheme == "allocation") != (self.participations is not None) or (
            (self.participations is None) != (self.block is None)
        ):
            raise ConfigError(
                "participations and block are for 'allocation' sampling, which needs both"
            )
        if self.participations is not None and self.block is not None:
            check_count("participations", self.participations)
            check_count("block", self.block)
            if abs(self.rate * self.block - self.participations) > _ROUNDING:
                raise ConfigError(
                    f"{self.participations} of {self.block} rounds are not a share of {self.rate:g}"
                )
        if self.scheme in ("poisson", "fixed", "allocation"):
            if self.separation is not None:
                raise ConfigError(
                    f"{self.scheme} sampling keeps no rounds between participations: use "
                    "'min-separation'"
                )
        else:
            self._check_separation()

    def _check_separation(self) -> None:
        b, cohort = self.separation, self.expected
        if not (isinstance(b, numbers.Integral) and b >= 1):
            raise ConfigError(
                f"{self.scheme} sampling needs a separation, a whole number of at least 1, got {b}"
            )
        if self.scheme == "cyclic" and abs(b * self.rate - 1) > _ROUNDING:
            raise ConfigError(
                f"a cycle of {b} groups invites 1/{b} of the clients in a round, but the rate is "
                f"{self.rate:g}"
            )
        if self.scheme == "min-separation" and b * cohort > self.population * (1 + _ROUNDING):
            raise ConfigError(
                f"{round(cohort)} clients per round, none of them again within {b} rounds, need a "
                f"population of at least {b * round(cohort)}, not {self.population}: lower the "
                "cohort or the separation"
            )
        if self.scheme == "grouped-poisson" and b * self.rate > 1 + _ROUNDING:
            raise ConfigError(
                f"with {b} groups a client takes part in its group's rounds with probability {b} x "
                f"{self.rate:g} = {b * self.rate:g}, which is more than 1: take at most "
                f"{int(1 / self.rate + _ROUNDING)} groups or a lower rate"
            )

    def __repr__(self) -> str:  # the owner of a Flower app's ledger is a hash of this text
        shown = ["scheme", "population", "rate", "separation"]
        if self.scheme == "allocation":
            shown += ["participations", "block"]
        return f"Sampling({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def scheduled(self) -> bool:
        """Whether a client's rounds depend on each other. If so, a run that is continued draws the
        same cohorts again.
        """
        return self.separation is not None or self.block is not None

    @property
    def expected(self) -> float:
        """Public cohort size q N, the denominator of every mean; not the actual number of
        clients.
        """
        return self.rate * self.population

    @property
    def within_group(self) -> float:
        """Probability that a client takes part in a round of its group: b q in "grouped-poisson", 1
        in "cyclic".

        For a scheme without groups this is q.
        """
        if self.scheme == "cyclic":
            return 1.0
        return (
            min(1.0, (self.separation or 1) * self.rate)
            if self.scheme == "grouped-poisson"
            else self.rate
        )

    def rate_of_any(self, clients: int) -> float:
        """Probability that a round draws at least one of these clients, or an upper bound on this
        probability.

        Poisson draws are independent of each other. For all other schemes, the sum of the clients'
        rates is an upper bound.

        Raises:
            ConfigError: `clients` is not a whole number of at least 1.

        Example:
            >>> Sampling("poisson", 10, 0.5).rate_of_any(2), Sampling("fixed", 10, 0.2).rate_of_any(2)
            (0.75, 0.4)
        """
        check_count("clients", clients)
        if self.scheme == "poisson":
            return 1 - (1 - self.rate) ** clients
        return min(1.0, clients * self.rate)

    @property
    def amplifies(self) -> bool:
        """Whether secret draws lower the cost of a participation."""
        return self.scheme != "min-separation" and self.within_group < 1

    def to_dict(self) -> dict[str, Any]:
        """JSON form."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def least_threshold(nodes: int, colluders: int) -> int:
    """Smallest threshold that two groups of a round's nodes cannot both reach.

    Two sets of t of n nodes share at least 2 t - n nodes. If 2 t - n exceeds the m colluders, both
    sets contain a common honest node. This node answers for only one set. The condition is
    therefore 2 t > n + m.

    Raises:
        ConfigError: a number is not whole, or is negative.

    Example:
        >>> least_threshold(10, 1), least_threshold(30, 3)
        (6, 17)
    """
    colluders = check_count("colluders", colluders, least=0)
    return (check_count("nodes", nodes, least=0) + colluders) // 2 + 1


@sealed
@dataclass(frozen=True)
class Shares:
    """The nodes on whose noise the guarantee relies: at least `threshold` nodes answer, and up to
    `colluders` of them may collude with the server.

    Example:
        >>> Shares(20, 3).honest
        17

    Attributes:
        threshold: number t of nodes that must answer; with fewer answers the round is void.
        colluders: number m of nodes that may pass their knowledge, including their own noise, to
            the server.
        noise: distribution of the nodes' noise, "discrete-gaussian" or "skellam".

    Raises:
        ConfigError: a number is outside its range, the threshold does not exceed the number of
            colluders, or the distribution is unknown.
    """

    threshold: int
    colluders: int = 0
    noise: str = integer_noise.DiscreteGaussian.name

    def __post_init__(self) -> None:
        check_count("threshold", self.threshold)
        check_count("colluders", self.colluders, least=0)
        if self.threshold <= self.colluders:
            raise ConfigError(
                f"a threshold of {self.threshold} with {self.colluders} colluders leaves no honest "
                "node whose noise counts: raise the threshold, or count on fewer colluders"
            )
        integer_noise.get(self.noise)

    @property
    def law(self) -> IntegerNoise:
        """The distribution of the nodes' noise."""
        return integer_noise.get(self.noise)

    def to_dict(self) -> dict[str, Any]:
        """JSON form. It omits the default distribution, so that the keys of noise, which depend on
        this form, stay the same.
        """
        record = asdict(self)
        if self.noise == integer_noise.DiscreteGaussian.name:
            del record["noise"]
        return record

    @property
    def honest(self) -> int:
        """Number t - m of nodes on whose noise the guarantee relies."""
        return self.threshold - self.colluders

    def check(self, asked: int) -> None:
        """Refuse a threshold that two groups of a round's nodes could both reach, or that all nodes
        together cannot reach.

        Raises:
            ConfigError: the threshold is below `least_threshold` or above `asked`.
        """
        t, m = self.threshold, self.colluders
        least = least_threshold(asked, m)
        if t > asked:
            raise ConfigError(
                f"a round asks {asked} nodes, so a threshold of {t} is never met: lower the "
                "threshold"
            )
        if t < least:
            raise ConfigError(
                f"with a threshold of {t} of {asked} nodes a server with {m} colluders could open "
                f"two sums of one round: the threshold must be at least {least}"
            )


class Part(NamedTuple):
    """A piece of the released vector: a layer or an auxiliary query.

    Attributes:
        name: name of the layer or query.
        size: number of coordinates.
        clip: bound of one unit's contribution (l2, or l1 for Laplace noise).
        sigma: scale of the noise that one noising party adds (std, or Laplace scale b).

    Example:
        >>> from fedlgm import Guarantee, LayerTable, ReleasePlan, RunFacts
        >>> layers, facts = LayerTable.from_sizes({"a": 4, "b": 1}), RunFacts(1.0, Sampling("poisson", 100, 0.1))
        >>> ReleasePlan(layers, [3.0, 4.0], [5.0, 5.0], facts, Guarantee("proven", "an example")).parts[1]
        Part(name='b', size=1, clip=4.0, sigma=5.0)
    """

    name: str
    size: int
    clip: float
    sigma: float
