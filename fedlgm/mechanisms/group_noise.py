"""Layer-wise i.n.i.d. Gaussian and Laplace noise, and the baselines with which the paper compares
it.

Layers are bounded in the norm that fits the noise (l2 for Gaussian, l1 for Laplace). Noise is
i.i.d. within a layer. One of three rules sets the layers' scales for a given budget:

    inid    least total squared error                  Gaussian: the "min-total-noise" allocation
    spr     scale-perturb-rescale: every coordinate    Gaussian: the "dimension-adjusted" allocation
            spends an equal share of the budget
    iid     one scale for all coordinates              Gaussian: the "uniform" allocation

Noise in proportion to a layer's bound alone, a frequent choice with group-wise clipping, is the
"sensitivity-proportional" allocation. Source: i.n.i.d. noise paper, Section VI-C, Theorems 4 and 5,
Definition 5.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import cast, get_args

import scipy
from typing_extensions import override

from fedlgm import privacy
from fedlgm.checks import (
    AtLeastOne,
    Positives,
    check_below_one,
    check_count,
    check_known,
    check_positive,
    check_rate,
)
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.mechanisms import inid
from fedlgm.mechanisms.mechanism import Bounded, one_per_layer
from fedlgm.mechanisms.profiles import Profile
from fedlgm.noise.draws import Family
from fedlgm.planning.facts import RunFacts
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import SENSITIVITY_FACTOR, Guarantee, Relation

_ORDER: dict[Family, int] = {"gaussian": 2, "laplace": 1}
_LARGEST_LOSS = 50.0  # pure epsilon of a release; above it, accountants' grids are too large
_TOLERANCE = 1e-6  # relative margin of the calibrated multiplier


@dataclass(frozen=True)
class GroupNoise(Bounded):
    """Per-layer bounds C_m with Gaussian or Laplace noise, whose scales follow one of the module's
    rules.

    The class is registered as "gaussian-inid", "gaussian-spr", "gaussian-iid", "laplace-inid",
    "laplace-spr" and "laplace-iid".

    Attributes:
        bound: bound C of a whole contribution, spread evenly over M layers (the paper's "flat"
            budgets): C_m = C / sqrt(M) in l2 norm for Gaussian noise, C_m = C / M in l1 norm for
            Laplace noise.
        bounds: public bounds C_m of the layers, in the same norm; they replace `bound`.
        p: p >= 1 of the expected l_p^p error, which the "inid" rules minimise.

    Example:
        >>> from fedlgm import Sampling
        >>> layers, facts = LayerTable.from_sizes({"a": 8, "b": 1}), RunFacts(2.0, Sampling("poisson", 100, 0.1))
        >>> plan = GroupNoise("laplace-inid").plan(layers, facts, Transcript(0, ()))
        >>> plan.clip.tolist(), plan.sigma.round(3).tolist(), round(plan.effective_multiplier, 6)
        ([0.5, 0.5], [1.5, 3.0], 2.0)
    """

    bounds: Positives = ()
    p: AtLeastOne = 2.0

    @property
    def family(self) -> Family:
        """Law of the noise, which the registered name determines."""
        return "laplace" if self.name.startswith("laplace") else "gaussian"

    def calibrate(self, facts: RunFacts) -> float:
        """Compute a round's noise multiplier: sigma_* for Gaussian noise, and the reciprocal of
        sum_m C_m / b_m for Laplace noise (see `calibrate_laplace`).
        """
        if self.family == "gaussian":
            return super().calibrate(facts)
        return calibrate_laplace(
            *facts.budget(),
            steps=facts.releases,
            sampling_rate=facts.accounted_rate,
            relation=facts.relation,
            accountant=facts.accountant,
        )

    @override
    def check_run(self, layers: LayerTable, facts: RunFacts) -> None:
        """Refuse Laplace noise for a run that is accounted for as one mechanism.

        Raises:
            ConfigError: the noise is Laplace, or the base class refuses the run.
        """
        super().check_run(layers, facts)
        if self.family == "laplace":
            raise ConfigError(
                f"{self.name}: a run is accounted for as one mechanism by the rotational symmetry "
                "of Gaussian noise, which Laplace noise lacks: use a Gaussian mechanism, or "
                "independent noise with Poisson sampling"
            )

    def plan(self, layers: LayerTable, facts: RunFacts, transcript: Transcript) -> ReleasePlan:
        """Make the round's plan, which is the same in every round.

        Raises:
            ConfigError: `bounds` does not have one entry per layer.
            PrivacyError: the facts have no noise.
        """
        order = _ORDER[self.family]
        even = [self.bound / len(layers) ** (1 / order)] * len(layers)
        clip = one_per_layer(self.name, layers, bounds=list(self.bounds) or even)
        if facts.noise_multiplier == 0:
            raise PrivacyError(
                f"{self.name}: a release without noise cannot carry a proven guarantee"
            )
        # i.i.d. noise in a layer costs the same as if each coordinate of the layer were bounded by
        # C_m / d_m^(1/order).
        profile = Profile(clip / layers.sizes ** (1 / order), layers.sizes)
        rule = cast(inid.Rule, self.name.removeprefix(f"{self.family}-"))
        scales = inid.noise_scales(self.family, rule, profile, 1.0 / facts.noise_multiplier, self.p)
        reason = f"every layer is bounded in l{order} norm before noise of a public scale is added to the sum"
        return ReleasePlan(
            layers, clip, scales, facts, Guarantee("proven", reason), family=self.family
        )


def names() -> tuple[str, ...]:
    """Return the names under which `GroupNoise` is registered.

    Example:
        >>> names()[:3]
        ('gaussian-inid', 'gaussian-spr', 'gaussian-iid')
    """
    return tuple(f"{family}-{rule}" for family in get_args(Family) for rule in get_args(inid.Rule))


def calibrate_laplace(
    epsilon: float,
    delta: float,
    *,
    steps: int,
    sampling_rate: float = 1.0,
    relation: Relation = "add-remove",
    accountant: str = "pld",
) -> float:
    """Return the multiplier of the least Laplace noise with which `steps` releases are (epsilon,
    delta)-DP.

    This is the counterpart of `privacy.calibrate` for Laplace noise. If the layers of a release
    have l1 bounds C_m and noise scales b_m, its multiplier is the reciprocal of sum_m C_m / b_m.
    This sum is the pure-DP epsilon of the release under add-or-remove-one (replace-one doubles the
    bounds). With delta = 0 the releases are epsilon-DP by basic composition of their amplified
    costs, without an accountant. With delta > 0, the accountant composes the releases (see
    `privacy.events.laplace_event`).

    Args:
        epsilon: target, > 0.
        delta: target in [0, 1).
        steps: number of releases, at least 1.
        sampling_rate: probability q in (0, 1] that a unit takes part in a release.
        relation: neighbouring relation.
        accountant: "pld"; "rdp" only without sampling.

    Returns:
        The multiplier, which is never too small. It is too large by at most a relative 1e-6, unless
        the budget allows a pure epsilon of more than 50 per release.

    Raises:
        ConfigError: an argument is outside its range.
        PrivacyError: the accountant cannot compose these releases.

    Example:
        >>> round(calibrate_laplace(1.0, 0.0, steps=4), 6)  # four releases of pure epsilon 1/4
        4.0
    """
    check_positive(epsilon=epsilon)
    check_below_one(delta=delta)
    check_count("steps", steps)
    check_rate(sampling_rate=sampling_rate)
    check_known("relation", relation, SENSITIVITY_FACTOR)
    check_known("accountant", accountant, privacy.accountants.ACCOUNTANTS)
    # The largest pure epsilon per release, even if the budget allows less noise.
    most = _LARGEST_LOSS if delta > 0 else privacy.events.LARGEST_PURE * (1 - _TOLERANCE)
    pure = min(math.log1p(math.expm1(min(epsilon / steps, most)) / sampling_rate), most)
    loss = (
        pure
        if delta == 0
        else _largest_loss(epsilon, delta, int(steps), sampling_rate, relation, accountant, pure)
    )
    return SENSITIVITY_FACTOR[relation] / loss


@lru_cache(maxsize=256)
def _largest_loss(
    target: float,
    delta: float,
    steps: int,
    rate: float,
    relation: Relation,
    accountant: str,
    pure: float,
) -> float:
    """Return the largest pure epsilon that the budget allows for one release without sampling.
    `pure` is the value that basic composition allows.
    """

    def excess(log_loss: float) -> float:
        # The loss is slightly above the returned one, because plans round their multiplier down to
        # nine digits.
        event = privacy.events.laplace_event(math.exp(log_loss) * (1 + 2e-8), rate, relation)
        return (
            min(privacy.accounting.composed_epsilon([(event, steps)], delta, accountant), 1e6)
            - target
        )

    low, high = math.log(pure), math.log(pure) + 0.5
    if pure >= _LARGEST_LOSS and excess(low) <= 0:
        return pure  # the budget requires hardly any noise, and more noise is safe
    while excess(low) > 0:  # an accountant's grid may cost a little more than basic composition
        low, high = low - 0.02, low
        if low < math.log(pure) - 2:
            raise PrivacyError(
                f"the {accountant} accountant cannot show that {steps} releases with Laplace noise "
                f"meet epsilon={target:g}, delta={delta:g}: raise epsilon, or set delta = 0 for "
                "basic composition"
            )
    while excess(high) < 0:
        low, high = high, high + 0.5
        if high > math.log(_LARGEST_LOSS):
            # the budget requires hardly any noise, and more noise is safe
            return math.exp(low)
    root = float(scipy.optimize.brentq(excess, low, high, xtol=_TOLERANCE / 4))
    while excess(root) > 0:
        root -= _TOLERANCE / 2
    return math.exp(root)
