"""The trust models: who adds the noise of a release, and what follows from this. Each trust model
is one object, whose methods contain everything that differs between the models.

>>> [who.name for who in NOISED_BY.values() if not who.uploads_released]
['central']
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from typing import NamedTuple

import numpy as np

from fedlgm import privacy
from fedlgm.checks import check_count, check_known
from fedlgm.errors import ConfigError
from fedlgm.libraries import Tensor
from fedlgm.noise.draws import Family, NoiseBackend, grid_step
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.records import Part, Sampling, Shares
from fedlgm.planning.views import Facts, NoiseSource, Plan, Sum
from fedlgm.privacy.guarantee import Relation, Status, Trust
from fedlgm.privacy.ledger import SERVER

NEGLIGIBLE = 1e-15
"""Probability that the norm of an honest client's noise exceeds the assumed limit."""

NUMBERS = ("<f4", "<f8")
"""Types of the numbers in a client's answer, unless the trust model states other types."""


class Adversary(NamedTuple):
    """Someone against whom a guarantee states an epsilon.

    Example:
        >>> Adversary("readers", 20, 0.5, 7.0, lambda exact, plan, keys, round: exact).nodes
        20

    Attributes:
        name: the adversary in words.
        nodes: number of nodes whose noise the adversary does not know.
        rate: rate of the sampling that amplifies a release against this adversary.
        epsilon: the stated epsilon of the whole run.
        released: function from an exact contribution or sum [plan.size], a plan, keys and a round
            to the part of the release that the adversary sees.
    """

    name: str
    nodes: int
    rate: float
    epsilon: float
    released: Callable[[Tensor, Plan, KeyRing, int], Tensor]


class NoisedBy:
    """Central trust: the server adds noise to the sum, so a round is one release of all clients
    together.

    Every other trust model is a subclass with methods of its own, and is listed in `NOISED_BY`.

    Example:
        >>> NoisedBy().noises_in_sum(20.0), NoisedByClients().noises_in_sum(20.0)
        (1.0, 20.0)

    Attributes:
        name: name of the trust model in facts and recipes.
        uploads_released: whether a client's upload is already a release, charged to the client.
        alone: whether the server may see a single client's upload. If not, it may see only a sum of
            several uploads.
        relation: neighbouring relation for which the guarantee of whole clients is usually proven.
        numbers: types that the numbers of a real node's answer may have.
        uncorrelated: reason why noise cannot be correlated over rounds; empty if it can be
            correlated.
        observed_rounds: an untrusted server's view of a round; empty if the server is trusted.
        answers: status and reason of a node's guarantee for its answers.
    """

    name: Trust = "central"
    uploads_released = False
    alone = True
    numbers: tuple[str, ...] = NUMBERS
    uncorrelated = ""
    observed_rounds = ""
    answers: tuple[Status, str] = (
        "conditional",
        "the server adds the noise, and is believed that it does",
    )
    relation: Relation = "add-remove"

    def accounted_rate(self, sampling: Sampling) -> float:
        """Sampling rate that amplifies the release of a whole client's contribution."""
        return 1.0 if sampling.scheme == "min-separation" else sampling.within_group

    def noises_in_sum(self, contributors: float) -> float:
        """Variance of the noise in a sum of `contributors` contributions, divided by the variance
        that the plan states.
        """
        return 1.0

    def limit(self, part: Part, family: Family) -> float:
        """Largest norm (l2, or l1 for Laplace noise) of an honest client's contribution to a
        part.
        """
        return part.clip

    def party(self, client: int) -> int:
        """Number of the party that adds noise to this client's contribution."""
        return SERVER

    def of(self, shares: Shares | None) -> NoisedBy:
        """The same trust model with a run's shares of the noise (ConfigError: the shares are
        missing, or this trust model has no shares).
        """
        if shares is not None:
            raise ConfigError(
                f"shares of the noise are for trust 'distributed', not {self.name!r}: leave them "
                "out"
            )
        return self

    def check_facts(self, facts: Facts) -> None:
        """Refuse facts that do not fit this trust model (ConfigError)."""

    def check_plan(self, plan: Plan) -> None:
        """Refuse a plan that cannot be carried out under this trust model (ConfigError)."""

    def unmet_condition(self, facts: Facts, min_cohort: int, max_colluders: int) -> str:
        """How a run fails to meet a node's conditions on sums with its peers; empty if it meets
        them.
        """
        return ""

    def check_costs(self, name: str, costs: np.ndarray) -> None:
        """Refuse a mechanism if the costs of its rounds do not fit this trust model (ConfigError;
        see `Mechanism.costs`).
        """

    def event(self, multiplier: float, rate: float) -> privacy.DpEvent:
        """Event of one release with Gaussian noise.

        Args:
            multiplier: noise std divided by the largest change of the release between neighbouring
                data sets.
            rate: rate of the sampling that amplifies the release.
        """
        from fedlgm.privacy.events import gaussian_event

        return gaussian_event(multiplier, rate)

    def calibrate(self, gaussian: float, within: Callable[[float], bool]) -> float:
        """Noise multiplier at which a run meets its budget.

        Args:
            gaussian: the smallest multiplier at which Gaussian noise meets the budget.
            within: function that says whether the events of a multiplier meet the budget.
        """
        return gaussian

    def against(self, facts: Facts) -> str:
        """The adversaries of a guarantee, if the other fields of the guarantee do not state them;
        otherwise empty.
        """
        return ""

    def adversaries(self, facts: Facts) -> tuple[Adversary, ...]:
        """All adversaries, if the guarantee states several epsilons; otherwise none."""
        return ()

    def source(self) -> NoiseSource[Plan] | None:
        """Source of the noise under this trust model; None if the source is
        `fedlgm.noise.run_noise.Independent`.
        """
        return None

    def open_sum(self, total: Sum) -> Tensor:
        """The sum of the clients' replies, in the model's units, [plan.size] float64."""
        return total.total

    def observe(
        self, exact: Tensor, plan: Plan, keys: KeyRing, round: int, backend: NoiseBackend
    ) -> Tensor | None:
        """Copy of a contribution [plan.size] with the noise on which the guarantee relies; None if
        this is the noise of a single release.
        """
        return None

    def public_figures(self, plan: Plan) -> dict[str, float]:
        """Public figures that this trust model adds to a plan, by name."""
        return {}

    def readers_epsilon(self, facts: Facts, rounds: int) -> float | None:
        """Epsilon after some rounds against readers of released models; None if it equals the
        general epsilon.
        """
        return None


class NoisedByClients(NoisedBy):
    """Each client adds noise to its contribution. Participation is visible, so sampling amplifies
    nothing.

    Example:
        >>> NoisedByClients().party(3), NoisedBy().party(3) == SERVER
        (3, True)
    """

    name: Trust = "local"
    uploads_released = True
    relation: Relation = "replace-one"
    observed_rounds = "every client's release"
    answers: tuple[Status, str] = (
        "proven",
        "every answer was bounded and noised before it left this node",
    )
    uncorrelated = (
        "the server sees every upload, so noise could only be correlated over one client's own "
        "uploads, where independent noise already has the least final and largest error"
    )

    def accounted_rate(self, sampling: Sampling) -> float:
        """1, because participation is visible."""
        return 1.0

    def noises_in_sum(self, contributors: float) -> float:
        """The number of contributions, because each client adds noise."""
        return contributors

    def limit(self, part: Part, family: Family) -> float:
        """The norm that a contribution with its noise hardly ever exceeds (`largest_norm`)."""
        return largest_norm(part, family)

    def party(self, client: int) -> int:
        """The client's own number, because the client adds the noise."""
        return client


NOISED_BY: dict[str, NoisedBy] = {kind.name: kind for kind in (NoisedBy(), NoisedByClients())}


def hides_answers(trusts: Iterable[str]) -> bool:
    """Whether, under at least one of these trust models, the server may see clients' messages only
    in a sum.

    Example:
        >>> hides_answers(["local", "central"])
        False
    """
    return any(not NOISED_BY[trust].alone for trust in NOISED_BY.keys() & set(trusts))


def weakest(trusts: Iterable[str]) -> NoisedBy:
    """The one of these trust models that has the weakest guarantee for answers; local trust if the
    list is empty.

    Example:
        >>> weakest({"local", "central"}).name
        'central'
    """
    kinds = [NOISED_BY[trust] for trust in NOISED_BY if trust in set(trusts)]
    return min(kinds or [NOISED_BY["local"]], key=lambda kind: kind.answers[0] == "proven")


def get(trust: str, shares: Shares | None = None) -> NoisedBy:
    """The trust model of this name, with the run's shares if there are any.

    Raises:
        ConfigError: the trust model is unknown, or the shares do not fit.

    Example:
        >>> get("local").relation
        'replace-one'
    """
    check_known("trust", trust, NOISED_BY)
    return NOISED_BY[trust].of(shares)


def largest_norm(part: Part, family: str) -> float:
    """Norm that a client's noisy part exceeds with probability at most 1e-15. It is the sum of the
    bound, the norm of the noise and the rounding to the grid.

    The norm of Gaussian noise, in l2, follows from the tail of the chi-square distribution; the
    norm of Laplace noise, in l1, follows from the tail of a sum of exponential variables.

    Example:
        >>> from fedlgm.planning.records import Part
        >>> largest_norm(Part("a", 100, 1.0, 0.0), "gaussian")
        1.0
        >>> 15 < largest_norm(Part("a", 100, 1.0, 1.0), "gaussian") < 20
        True
    """
    if part.sigma == 0 or not math.isfinite(part.clip):
        return part.clip
    if family == "gaussian":
        return (
            part.clip
            + part.sigma * gaussian_norm(part.size)
            + grid_step(part.sigma) * math.sqrt(part.size)
        )
    return part.clip + part.sigma * _gamma_tail(part.size) + grid_step(part.sigma) * part.size


def gaussian_norm(size: int) -> float:
    """The l2 norm that `size` standard normal numbers exceed with a negligible probability,
    computed from the tail of the chi-square distribution.

    Raises:
        ConfigError: `size` is not a whole number of at least 0.

    Example:
        >>> round(gaussian_norm(100), 2)
        16.02
    """
    return math.sqrt(2 * _gamma_tail(check_count("size", size, least=0) / 2))


def _gamma_tail(shape: float) -> float:
    """Number that a Gamma variable of this shape and scale 1 exceeds with a negligible
    probability.
    """
    import scipy.special  # clients do not need it, and start faster without it

    return float(scipy.special.gammainccinv(shape, NEGLIGIBLE))
