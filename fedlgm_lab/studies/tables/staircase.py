"""Staircase noise in two dimensions: the epsilon-DP noise of least mean absolute (l1) error.

Its density is constant on shells of the l1 norm and drops by e^-epsilon once in every interval of
one sensitivity, at a fraction gamma of it. It uses only the query's global l1 sensitivity; i.n.i.d.
Laplace noise uses one sensitivity per coordinate, which is why it can win (i.n.i.d. noise paper,
section V-D and Table II).

Sources: Geng and Viswanath, "The Optimal Noise-Adding Mechanism in Differential Privacy" (one
dimension); Geng, Kairouz, Oh and Viswanath, "The Staircase Mechanism in Differential Privacy" (two
dimensions, l1). The closed form of the error in two dimensions comes from integrating over the
shells, whose areas are differences of 2 radius^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import scipy

from fedlgm.errors import ConfigError

Array = npt.NDArray[np.float64]
_LARGEST_EPSILON = 700.0  # e^-epsilon is still a normal double


@dataclass(frozen=True)
class Staircase2D:
    """Two-dimensional staircase noise, epsilon-DP for a query of the given l1 sensitivity.

    The two coordinates are dependent: the density is a function of their l1 norm.

    Args:
        epsilon: privacy budget, in (0, 700].
        sensitivity: l1 sensitivity of the query, > 0.
        gamma: fraction of each step before the drop, in [0, 1].

    Raises:
        ConfigError: a value out of range.
    """

    epsilon: float
    sensitivity: float
    gamma: float

    def __post_init__(self) -> None:
        _check_epsilon(self.epsilon)
        if not (math.isfinite(self.sensitivity) and self.sensitivity > 0):
            raise ConfigError(f"sensitivity must be finite and > 0, got {self.sensitivity}")
        if not 0 <= self.gamma <= 1:
            raise ConfigError(f"gamma must lie in [0, 1], got {self.gamma}")

    @classmethod
    def optimal(cls, epsilon: float, sensitivity: float = 1.0) -> Staircase2D:
        """The noise of least expected l1 norm."""
        _check_epsilon(epsilon)
        return cls(epsilon, sensitivity, _best_gamma_2d(epsilon))

    def density(self, x: npt.ArrayLike) -> Array:
        """Density at points `x`, shape [..., 2]; the result has shape [...]."""
        points = np.asarray(x, dtype=np.float64)
        if points.ndim == 0 or points.shape[-1] != 2:
            raise ConfigError(f"points of the plane need shape [..., 2], got {points.shape}")
        peak = self._drop**2 / (2 * self.sensitivity**2 * (self._v() ** 2 + self._ratio))
        return peak * self._fall(np.abs(points).sum(axis=-1))

    def sample(self, rng: np.random.Generator, size: int) -> Array:
        """Draw `size` independent noises, shape [size, 2].

        The area of a shell is affine in its step k, so the law of k is a mixture of a geometric one
        (masses b^k) and one plus a negative binomial one (masses k b^k); within its shell the
        radius has a linear density, and the direction is uniform.
        """
        gamma, b, drop = self.gamma, self._ratio, self._drop
        masses = np.array(
            [gamma**2, 2 * gamma * b / drop, b * (1 - gamma**2), 2 * b * (1 - gamma) * b / drop]
        )
        part = rng.choice(
            4, size, p=masses / masses.sum()
        )  # before the drop (b^k, k b^k), after it (b^k, k b^k)
        step = np.where(
            part % 2 == 0, rng.geometric(drop, size) - 1, 1 + rng.negative_binomial(2, drop, size)
        )
        inner = step + np.where(part < 2, 0.0, gamma)
        outer = step + np.where(part < 2, gamma, 1.0)
        radius = self.sensitivity * np.sqrt(inner**2 + rng.random(size) * (outer**2 - inner**2))
        share = rng.random(size)
        signs = rng.choice(np.array([-1.0, 1.0]), (size, 2))
        noise: Array = signs * radius[:, None] * np.stack((share, 1 - share), axis=1)
        return noise

    def expected_l1(self) -> float:
        """E||noise||_1 = (2/3) sensitivity (v^3 + 3 b v + b (1 + b)) / ((1 - b)(v^2 + b)).

        Here b = e^-epsilon and v = b + (1 - b) gamma.
        """
        b, v = self._ratio, self._v()
        return (
            2 / 3 * self.sensitivity * (v**3 + 3 * b * v + b * (1 + b)) / (self._drop * (v**2 + b))
        )

    @property
    def _ratio(self) -> float:
        return math.exp(-self.epsilon)

    @property
    def _drop(self) -> float:
        return -math.expm1(-self.epsilon)

    def _fall(self, radius: Array) -> Array:
        """Density relative to the origin; it falls by e^-epsilon in every step, at its fraction
        gamma.
        """
        step = np.floor(radius / self.sensitivity)
        dropped = radius / self.sensitivity - step >= self.gamma
        return np.exp(-self.epsilon * (step + dropped))

    def _v(self) -> float:
        return self._ratio + self._drop * self.gamma


def _best_gamma_2d(epsilon: float) -> float:
    """The gamma that minimises the expected l1 norm in two dimensions.

    With v = b + (1 - b) gamma the error is stationary where v^4 - 2 b (1 + b) v + 3 b^2 = 0, and
    least at the larger root. Both branches solve that equation, in a variable that neither cancels
    (small epsilon) nor vanishes (large).
    """
    b, drop = math.exp(-epsilon), -math.expm1(-epsilon)
    if (
        epsilon < 1
    ):  # v = 1 - drop t, equation divided by drop^2: the smaller root in t, (3 - sqrt 3)/6 as drop -> 0

        def in_t(t: float) -> float:
            return 6 * t * t - 6 * t + 1 + drop * (2 * t - 4 * t**3) + drop**2 * t**4

        return 1 - float(scipy.optimize.brentq(in_t, 0.0, 0.5, xtol=1e-15))

    root = math.cbrt(b)

    def in_x(x: float) -> float:  # v = b^(1/3) x, equation divided by b^(4/3)
        return x**4 - 2 * (1 + b) * x + 3 * root**2

    least = math.cbrt((1 + b) / 2)  # the quartic falls until here and rises after
    return (root * float(scipy.optimize.brentq(in_x, least, 2.0, xtol=1e-15)) - b) / drop


def _check_epsilon(epsilon: float) -> None:
    if not 0 < epsilon <= _LARGEST_EPSILON:
        raise ConfigError(
            f"epsilon of a staircase must lie in (0, {_LARGEST_EPSILON:g}], got {epsilon}"
        )
