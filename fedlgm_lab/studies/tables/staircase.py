"""Staircase noise in two dimensions: the epsilon-DP noise of least mean absolute (l1) error.

Its density is constant on shells of the l1 norm and drops by the factor e^-epsilon once in every
interval of one sensitivity, at the fraction gamma of the interval. Staircase noise uses only the
query's global l1 sensitivity. In contrast, i.n.i.d. Laplace noise uses one sensitivity per
coordinate, so its error can be smaller (i.n.i.d. noise paper, section V-D and Table II).

Sources: Geng and Viswanath, "The Optimal Noise-Adding Mechanism in Differential Privacy" (one
dimension); Geng, Kairouz, Oh and Viswanath, "The Staircase Mechanism in Differential Privacy" (two
dimensions, l1). The closed form of the error in two dimensions comes from integrating over the
shells, whose areas are differences of 2 radius^2.
"""

from __future__ import annotations

import math

import scipy


def expected_l1(epsilon: float, gamma: float) -> float:
    """Compute E||noise||_1 = (2/3) (v^3 + 3 b v + b (1 + b)) / ((1 - b)(v^2 + b)), for l1
    sensitivity 1.

    Here b = e^-epsilon and v = b + (1 - b) gamma.
    """
    b, drop = math.exp(-epsilon), -math.expm1(-epsilon)
    v = b + drop * gamma
    return 2 / 3 * (v**3 + 3 * b * v + b * (1 + b)) / (drop * (v**2 + b))


def best_gamma(epsilon: float) -> float:
    """Find the gamma that minimises the expected l1 norm, for epsilon in (0, 700].

    With v = b + (1 - b) gamma, the error is stationary where v^4 - 2 b (1 + b) v + 3 b^2 = 0, and
    least at the larger root. Both branches of the code solve this equation: for small epsilon in
    the variable t, which avoids cancellation, and otherwise in the variable x, which stays away
    from 0.
    """
    b, drop = math.exp(-epsilon), -math.expm1(-epsilon)
    # v = 1 - drop t, equation divided by drop^2: the smaller root in t, (3 - sqrt 3)/6 as drop -> 0
    if epsilon < 1:

        def in_t(t: float) -> float:
            return 6 * t * t - 6 * t + 1 + drop * (2 * t - 4 * t**3) + drop**2 * t**4

        return 1 - float(scipy.optimize.brentq(in_t, 0.0, 0.5, xtol=1e-15))

    root = math.cbrt(b)

    def in_x(x: float) -> float:  # v = b^(1/3) x, equation divided by b^(4/3)
        return x**4 - 2 * (1 + b) * x + 3 * root**2

    least = math.cbrt((1 + b) / 2)  # the quartic decreases up to here and then increases
    return (root * float(scipy.optimize.brentq(in_x, least, 2.0, xtol=1e-15)) - b) / drop
