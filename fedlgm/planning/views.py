"""The parts of facts and plans that trust models and charges use. The modules of trust models and
charges do not import the plan, because the plan imports them.
"""

from __future__ import annotations

from typing import Protocol, TypeVar

from fedlgm.libraries import Tensor
from fedlgm.noise.draws import Family, NoiseBackend
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.records import Part, Sampling, Shares
from fedlgm.privacy.guarantee import Relation


class Facts(Protocol):
    """The facts of a run (`fedlgm.planning.facts.RunFacts`) that a trust model uses."""

    @property
    def noise_multiplier(self) -> float:
        """Noise multiplier sigma_*."""

    @property
    def sampling(self) -> Sampling:
        """Rule that chooses the participants of a round."""

    @property
    def relation(self) -> Relation:
        """Neighbouring relation."""

    @property
    def rounds(self) -> int:
        """Number of rounds."""

    @property
    def releases(self) -> int:
        """Largest number of releases that can contain one client's data."""

    @property
    def epsilon(self) -> float | None:
        """Budget of the whole run."""

    @property
    def delta(self) -> float | None:
        """Delta of this budget."""

    @property
    def accountant(self) -> str:
        """Name of the accountant."""

    @property
    def steps(self) -> object | None:
        """Noisy steps that each client makes in a round; None without such steps."""

    @property
    def shares(self) -> Shares | None:
        """Under distributed trust, the nodes on whose noise the guarantee relies; otherwise
        None.
        """

    def budget(self) -> tuple[float, float]:
        """The run's budget (epsilon, delta)."""


class Plan(Protocol):
    """The numbers of a plan (`fedlgm.planning.plan.ReleasePlan`) that a trust model uses."""

    @property
    def protected(self) -> bool:
        """Whether the release has a privacy guarantee."""

    @property
    def facts(self) -> Facts:
        """Facts of the run."""

    @property
    def family(self) -> Family:
        """Distribution family of the noise."""

    @property
    def bounded_by(self) -> str:
        """The party that bounds contributions."""

    @property
    def size(self) -> int:
        """Length of the released vector."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """Everything that is released: first the layers, then the auxiliary queries."""

    @property
    def effective_multiplier(self) -> float:
        """Noise multiplier sigma_eff of the whole release under add-or-remove-one."""


class Sum(Protocol):
    """A sum of clients' replies (`fedlgm.aggregation.BoundedSum`)."""

    @property
    def total(self) -> Tensor:
        """The sum, [plan.size]."""

    @property
    def count(self) -> int:
        """Number of clients in the sum."""

    @property
    def plan(self) -> Plan:
        """The plan of the sum's round."""


P_contra = TypeVar("P_contra", contravariant=True)


class NoiseSource(Protocol[P_contra]):
    """Draws the noise of releases.

    Example:
        >>> from fedlgm.noise.run_noise import INDEPENDENT, RunNoise
        >>> INDEPENDENT.following(KeyRing.from_seed(1), 2) == RunNoise().following(KeyRing.from_seed(1), 2)
        True
    """

    def following(self, keys: KeyRing, round: int) -> KeyRing:
        """The ring of a round's noise. It is derived from the run's ring and from the earlier noise
        on which this noise depends.
        """

    def add_(
        self,
        total: Tensor,
        plan: P_contra,
        ring: KeyRing,
        round: int,
        party: int,
        backend: NoiseBackend,
    ) -> Tensor:
        """Add a release's noise to its sum, in place; the arguments are those of
        `fedlgm.noise.release.Noising`.

        Raises:
            ConfigError, PrivacyError, RunError: see `fedlgm.noise.release.release`.
        """
