"""Correlation of noise over a run's rounds: a lower-triangular Toeplitz matrix C, its sensitivity
and its error.

A release of round t is y_t = x_t + s w_t with C w = z, z independent N(0, 1), and x_t the sum of
bounded contributions. C is public and invertible, so publishing y is equivalent to publishing C x +
s z. This is a Gaussian mechanism, even if contributions and participation depend on earlier
releases (Denisov et al. 2022). One client moves C x by at most c sens(C), where c bounds the norm
of each of the client's contributions, so the run is one Gaussian mechanism of noise multiplier s /
(c sens(C)).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NotRequired, TypedDict

import numpy as np
from scipy.linalg import toeplitz
from scipy.signal import lfilter

from fedlgm.checks import check_count, check_known
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import sealed
from fedlgm.noise.correlation import blt, sensitivities
from fedlgm.noise.correlation.toeplitz import Reduce
from fedlgm.noise.correlation.workloads import Workload, as_workload

MOST_ROUNDS = 1_000_000
# largest product of rounds and coefficients; at this limit, accounting takes only seconds, also in
# the service of a node
_MOST_PRODUCTS = 10**9
MOST_BUFFERS = 8
_ROUNDING = 1e-9
# largest coefficient, so that squares of coefficients and float32 noise neither overflow nor vanish
_LARGEST = 1e6
_LOUDEST = 1e12  # largest noise of a round, in units of the std of z; noise is stored in float32


class CorrelationRecord(TypedDict):
    """JSON form of `Correlation`: the buffers, or the coefficients of a correlation without
    buffers.
    """

    name: str
    rounds: int
    decays: NotRequired[list[float]]
    scales: NotRequired[list[float]]
    coefficients: NotRequired[list[float]]


@sealed
@dataclass(frozen=True, eq=False)
class Correlation:
    """Noise correlated over `rounds` rounds by a lower-triangular Toeplitz matrix C.

    Build it with `fedlgm.noise.correlation.get`. Rounds count from 0.

    Example:
        >>> from fedlgm import correlation
        >>> c = correlation.get("square-root", 4, bands=2)
        >>> c.matrix().round(3)
        array([[0.894, 0.   , 0.   , 0.   ],
               [0.447, 0.894, 0.   , 0.   ],
               [0.   , 0.447, 0.894, 0.   ],
               [0.   , 0.   , 0.447, 0.894]])
        >>> round(c.sensitivity(min_separation=2), 6), round(c.error(), 4)
        (1.414214, 1.3993)

    Attributes:
        name: "identity", "square-root", "banded", "blt", or another name for coefficients that you
            choose yourself.
        rounds: planned number T of releases. The guarantee covers fewer rounds, but not more.
        coefficients: first column of C without the zeros after the last band, float64: c_0 > 0,
            then the other bands ("blt" has T in all).
        decays: decays of the buffers of "blt", in (0, 1); empty for all other strategies.
        scales: scales of the buffers of "blt", positive, with a sum of at most 1.

    Raises:
        ConfigError: coefficients are not finite or are extreme, there are too many of them (more
            than T, or more than 1e9 / T), c_0 <= 0, or buffers are outside their ranges.
    """

    name: str
    rounds: int
    coefficients: np.ndarray
    decays: tuple[float, ...] = ()
    scales: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        check_count("rounds", self.rounds, most=MOST_ROUNDS)
        c = np.array(self.coefficients, dtype=np.float64)
        if c.ndim != 1 or not 1 <= c.size <= self.rounds:
            raise ConfigError(
                f"coefficients must be a list of 1 to {self.rounds} numbers, got shape {c.shape}"
            )
        check_size(c.size, self.rounds)
        if not np.isfinite(c).all():
            raise ConfigError("coefficients must be finite")
        if c[0] < 1 / _LARGEST or np.abs(c).max() > _LARGEST:
            raise ConfigError(
                f"coefficients must lie within {_LARGEST:g} and the first one be at least "
                f"{1 / _LARGEST:g}, got {c[np.abs(c).argmax()]:g} and {c[0]:g}: noise is "
                "calibrated to them, so scale them all by the same factor"
            )
        decays, scales = np.array(self.decays), np.array(self.scales)
        if (
            decays.shape != scales.shape
            or not ((decays > 0) & (decays < 1)).all()
            or not (scales > 0).all()
        ):
            raise ConfigError("buffers need decays in (0, 1) and as many positive scales")
        if decays.size and not np.array_equal(c, blt.coefficients(decays, scales, self.rounds)):
            raise ConfigError("the coefficients do not follow from the buffers")
        c.setflags(write=False)
        object.__setattr__(self, "rounds", int(self.rounds))
        object.__setattr__(self, "coefficients", c)

    @classmethod
    def from_buffers(
        cls, rounds: int, decays: tuple[float, ...], scales: tuple[float, ...]
    ) -> Correlation:
        """The buffered Toeplitz strategy c_0 = 1, c_j = sum_i scale_i decay_i^(j-1).

        Raises:
            ConfigError: there are too many buffers, or the scales sum to more than 1.
        """
        check_count("rounds", rounds, most=MOST_ROUNDS)
        if not len(decays) == len(scales) <= MOST_BUFFERS or not sum(scales) <= 1 + _ROUNDING:
            raise ConfigError(
                f"a buffered strategy has at most {MOST_BUFFERS} buffers, whose scales sum to at "
                "most 1"
            )
        c = blt.coefficients(
            np.array(decays, dtype=np.float64), np.array(scales, dtype=np.float64), rounds
        )
        return cls("blt", rounds, c, tuple(decays), tuple(scales))

    @property
    def bands(self) -> int | None:
        """Number of diagonals of C that are not zero; None for "blt", which has buffers instead."""
        return None if self.decays else self.coefficients.size

    @property
    def is_independent(self) -> bool:
        """Whether C is the identity, so that the noise of different rounds is independent."""
        return self.coefficients.size == 1 and self.coefficients[0] == 1.0

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Correlation) and self._identity == other._identity

    def __hash__(self) -> int:
        return hash(self._identity)

    @property
    def _identity(self) -> tuple[Any, ...]:
        return self.name, self.rounds, self.coefficients.tobytes(), self.decays, self.scales

    # --- matrices

    def matrix(self) -> np.ndarray:
        """The lower-triangular Toeplitz matrix C, float64 [T, T]."""
        return toeplitz(self._pad(self.coefficients), np.zeros(self.rounds))

    def inverse(self) -> np.ndarray:
        """The inverse of C, float64 [T, T]. Row t gives the noise of round t as a combination of
        z.
        """
        return toeplitz(self._noising, np.zeros(self.rounds))

    def leading(self, rounds: int) -> Correlation:
        """The correlation of the first `rounds` rounds alone, with the same noise in these rounds.

        Raises:
            ConfigError: `rounds` is below 1 or above T.
        """
        check_count("rounds", rounds, most=self.rounds)
        return replace(self, rounds=rounds, coefficients=self.coefficients[:rounds])

    # --- sensitivities

    def sensitivity(self, min_separation: int, max_participations: int | None = None) -> float:
        """Sensitivity sens(C) for clients that take part at least `min_separation` rounds apart.

        If s is the scale of the noise s w and c bounds the norm of each contribution of a client,
        the whole run is one Gaussian mechanism of noise multiplier s / (c sens(C)) under zero-out
        (the schedule stays the same, and the client's contributions become zero). The same holds
        under add-or-remove-one if no other client's participation depends on whether this client is
        present. Under replace-one the multiplier is half as large.

        Args:
            min_separation: b >= 1; a client that took part in round t takes part again in round t +
                b at the earliest.
            max_participations: largest number of participations of one client; None stands for
                ceil(T / b).

        Returns:
            The exact value, rounded up, if the coefficients decrease, if there are at most
            `min_separation` of them or if every client takes part once. Otherwise an upper bound:
            in 3,000 random strategies of 4 to 10 rounds, this bound was on average 1 % and at most
            17 % above the bound that follows from the largest sum of abs(C^T C) over a pattern of
            participation. If no coefficient is negative, the latter bound is the exact value.

        Raises:
            ConfigError: a number is below 1.

        Source: Choquette-Choo et al. 2023 (arXiv 2306.08153, Algorithm 4); Kalinin and Lampert 2024
            (arXiv 2405.13763, Theorem 2).
        """
        return self.prefix_sensitivity(self.rounds, min_separation, max_participations)

    def prefix_sensitivity(
        self, rounds: int, min_separation: int, max_participations: int | None = None
    ) -> float:
        """Sensitivity of the first `rounds` rounds alone, which determines the cost so far; 0 for
        no rounds. It does not decrease with the number of rounds. Arguments, errors and source are
        those of `sensitivity`.

        Raises:
            ConfigError: `rounds` is outside 0 to the number of rounds.
        """
        check_count("rounds", rounds, least=0, most=self.rounds)
        most = _participations(self.rounds, min_separation, max_participations)
        squared = self._squared_sensitivity(rounds, min_separation, most)
        return self._rounded_up(squared)

    def round_sensitivities(
        self, min_separation: int, max_participations: int | None = None
    ) -> np.ndarray:
        """Root of the increase of the squared sensitivity by each round, (sens_{t+1}^2 -
        sens_t^2)^(1/2), float64 [T].

        If round t is charged as a Gaussian mechanism of noise multiplier s / (c times this value),
        the charges compose to the cost of the rounds released so far. The value is 0 for a round
        that adds nothing. Arguments and errors are those of `sensitivity`.
        """
        most = _participations(self.rounds, min_separation, max_participations)
        if sensitivities.is_decreasing(self.coefficients):
            steps = (
                sensitivities.earliest_pattern(self.coefficients, self.rounds, min_separation, most)
                ** 2
            )
        else:
            prefixes = [
                self._squared_sensitivity(t, min_separation, most) for t in range(self.rounds + 1)
            ]
            steps = np.diff(np.maximum.accumulate(prefixes))
        up = self.sensitivity(min_separation, max_participations) / math.sqrt(steps.sum())
        return np.sqrt(steps) * max(1.0, up)

    def column_norms(self) -> np.ndarray:
        """l2 norm of each column of C, float64 [T]."""
        return np.sqrt(sensitivities.squared_column_norms(self.coefficients, self.rounds))

    def amplified_column_norm(self) -> float:
        """Largest column norm of C, rounded up. Multiplied by the bound c of a contribution, it is
        the largest shift of C x by one participation.

        Suppose that every client belongs to one of at least `bands` groups. In each round of its
        group, the client takes part with probability p, decided by a secret draw. The run then
        costs at most as much as ceil(T / groups) Poisson-sampled Gaussians of rate p and noise
        multiplier s / (c times this norm) (Choquette-Choo et al. 2023, arXiv 2306.08153, Theorem
        4).
        """
        return self._rounded_up(
            float(sensitivities.squared_column_norms(self.coefficients, self.rounds).max())
        )

    def row_bound(
        self, t: int, min_separation: int, max_participations: int | None = None
    ) -> float:
        """Largest shift of row t of C x by one client, rounded up: the largest sum of |C[t, r]|
        over the client's rounds r <= t, for contributions of norm 1. It bounds the shift if the row
        is released again. Rows count from 0.

        Raises:
            ConfigError: the round is outside the run, or a number is below 1.
        """
        check_count("t", t, least=0, most=self.rounds - 1)
        most = _participations(t + 1, min_separation, max_participations)
        row = np.abs(self._pad(self.coefficients)[: t + 1][::-1])
        return self._rounded_up(float(sensitivities.best(row, min_separation, most)) ** 2)

    # --- errors

    def error(self, workload: str | Workload = "prefix", reduce: Reduce = "mean") -> float:
        """Error of the run's outputs A y in one coordinate, for z of standard deviation 1 and the
        matrix A of the workload.

        The product of this error, the sensitivity, the bound and the noise multiplier is the error
        at that multiplier.

        Args:
            workload: "prefix" (the model after each round of plain averaging), or a `Workload`.
            reduce: "mean": root mean square over the T outputs; "max": the largest error of an
                output.

        Raises:
            ConfigError: the workload or the reduction is unknown.
        """
        variances = as_workload(workload).variances(self.coefficients, self.rounds)
        check_known("reduce", reduce, Reduce)
        return math.sqrt(variances.mean() if reduce == "mean" else variances.max())

    def noise_std(self) -> np.ndarray:
        """Standard deviation of each round's noise w_t for z of standard deviation 1, float64 [T].

        A single round is noisier than with independent noise; only sums over rounds are less noisy.
        Figures that square the noise of one round (signal-to-noise ratios, norms after subtracting
        noise) must use this deviation.
        """
        return np.sqrt(np.cumsum(self._noising**2))

    def check_noise(self) -> None:
        """Refuse a C so close to singular that noise grows from round to round until it cannot be
        represented.

        Raises:
            ConfigError: the noise grows too large; the message names the round.
        """
        if self.decays:
            return  # the scales sum to at most 1, so the noise stays small
        with np.errstate(over="ignore", invalid="ignore"):
            quiet = self.noise_std() <= _LOUDEST
        if not quiet.all():
            raise ConfigError(
                f"correlation {self.name!r} makes more than {_LOUDEST:g} times its independent "
                "noise in round "
                f"{int(quiet.argmin()) + 1}: later coefficients are too large relative to the first"
            )

    # --- storage

    def to_dict(self) -> CorrelationRecord:
        """JSON form. It is exact, because Python's JSON keeps all digits of doubles."""
        record: CorrelationRecord = {"name": self.name, "rounds": self.rounds}
        if self.decays:
            return {**record, "decays": list(self.decays), "scales": list(self.scales)}
        return {**record, "coefficients": self.coefficients.tolist()}

    @classmethod
    def from_dict(cls, record: Mapping[str, Any]) -> Correlation:
        """Inverse of `to_dict`.

        Raises:
            ConfigError: the record does not describe a correlation.
        """
        try:
            if "decays" in record:
                if record["name"] != "blt":
                    raise ConfigError("not a correlation: only 'blt' has buffers")
                return cls.from_buffers(
                    record["rounds"], tuple(record["decays"]), tuple(record["scales"])
                )
            return cls(
                record["name"], record["rounds"], np.array(record["coefficients"], dtype=np.float64)
            )
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(f"not a correlation: {error}") from error

    @cached_property
    def _noising(self) -> np.ndarray:
        """First column of C^-1, [T]."""
        return lfilter([1.0], self.coefficients, np.eye(self.rounds, 1)[:, 0])

    def _squared_sensitivity(self, rounds: int, separation: int, most: int) -> float:
        if rounds == 0:
            return 0.0
        return sensitivities.squared_sensitivity(
            self.coefficients[:rounds], rounds, separation, most
        )

    def _rounded_up(self, squared: float) -> float:
        root = math.sqrt(squared)
        if self.is_independent:  # `squared` is a whole number without rounding error
            return root if root == int(root) else math.nextafter(root, math.inf)
        return sensitivities.rounded_up(squared, self.rounds)

    def _pad(self, c: np.ndarray) -> np.ndarray:
        return np.pad(c, (0, self.rounds - c.size))


def check_size(coefficients: int, rounds: int) -> None:
    """Refuse more coefficients than can be accounted for. This check precedes the optimisation of
    coefficients, which takes longest.

    Raises:
        ConfigError: there are too many coefficients.
    """
    if coefficients * rounds > _MOST_PRODUCTS:
        raise ConfigError(
            f"{coefficients:,} coefficients over {rounds:,} rounds take too long to account for: "
            f"their product may be at most {_MOST_PRODUCTS:,}; use fewer bands"
        )


def _participations(rounds: int, separation: int, limit: int | None) -> int:
    check_count("the minimum number of rounds between participations", separation)
    if limit is not None:
        check_count("max_participations", limit)
    return sensitivities.participations(rounds, int(separation), limit)
