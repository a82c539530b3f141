"""The rules of `fedlgm check`. Each rule is one function, which judges one assumption.

A rule returns None if it does not concern the run; otherwise its verdict includes the effect on the
proven figure. To add a rule, it therefore suffices to write one function with the decorator `rule`.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from fedlgm.check.settings import MEDCLIP_RULES, WEIGHTED_PAPERS, Settings
from fedlgm.check.verdict import Verdict

Rule = Callable[[Settings], Verdict | None]
RULES: dict[str, Rule] = {}
"""All rules by name, in the order in which a report lists their verdicts."""

_MEDCLIP = (
    "As published (MedClip), bounds and noise scales are medians of private norms: the noise scale "
    "alone can reveal one unit."
)
_WITHOUT_BOUND = {
    "svt": "The sparse-vector filter adds noise to values that are not bounded first, and its "
    "epsilon covers the threshold alone.",
    "percentile": "Keeping the largest changes is a truncation: no noise is added.",
    "percentile-gaussian": "The noise is scaled with a percentile of the private values, which are "
    "not bounded.",
    "ledger": "The releases are in a ledger of fedlgm: name the run's folder instead.",
    "ladp:published": "As published, LaDP-FL uploads some layers without noise and scales the "
    "noise with private weights.",
    "lm-dp-sgd:published": "As published, the layer weights depend on the batch: one example "
    "changes every example's contribution.",
    **{f"{name}:published": _MEDCLIP for name in MEDCLIP_RULES},
}


def rule(function: Rule) -> Rule:
    """Register a rule under the name of its function, with spaces for underscores.

    Example:
        >>> RULES["delta"](Settings(delta=0.01, population=500)).status
        'broken'
    """
    RULES[function.__name__.replace("_", " ")] = function
    return function


@rule
def description(settings: Settings) -> Verdict | None:
    """Judge whether the description has all settings that the figure needs."""
    if settings.mechanism in _WITHOUT_BOUND:
        return None
    missing = [
        name
        for name in ("noise_multiplier", "clipping", "delta")
        if getattr(settings, name) is None
    ]
    if settings.sampler == "poisson" and settings.rate is None:
        missing.append("sampling_rate")
    if settings.participation_count is None:
        missing.append("epochs" if settings.sampler == "shuffle" else "steps")
    if not missing:
        return Verdict("holds", "All settings that the figure needs are stated.")
    return Verdict(
        "conditional", f"The description lacks {', '.join(missing)}.", missing=tuple(missing)
    )


@rule
def mechanism(settings: Settings) -> Verdict | None:
    """Judge whether the mechanism is private at all."""
    if settings.mechanism in _WITHOUT_BOUND:
        return Verdict("broken", _WITHOUT_BOUND[settings.mechanism], bound=False)
    if settings.mechanism.partition(":")[0] in WEIGHTED_PAPERS:
        return Verdict(
            "conditional",
            "Noise that is not identical over coordinates is sound as published, with two "
            "exceptions: for a weighted error (Remark 4), the noise scales must be divided by the "
            "weights; Laplace noise has no pure epsilon by Renyi accounting. Check the profile "
            "with `fedlgm plan`.",
            bound=False,
        )
    if settings.mechanism == "none" or settings.noise_multiplier == 0:
        return Verdict("broken", "No noise is added.", bound=False)
    if settings.noise_seed == "public":
        return Verdict(
            "broken",
            "The seed of the noise is public: anyone can draw the noise again and subtract it.",
            bound=False,
        )
    if settings.mechanism == "laplace" and settings.norm != "l1":
        return Verdict(
            "broken" if settings.norm else "conditional",
            "Laplace noise needs a bound in the l1 norm; an l2 bound of c allows c times the root "
            "of the dimension.",
            bound=False,
            missing=() if settings.norm else ("norm",),
        )
    return None


@rule
def sampling(settings: Settings) -> Verdict | None:
    """Judge whether the run samples as its accounting assumes."""
    sampler, accounted = settings.sampler, settings.accounted_as
    amplifies = accounted in ("poisson", "fixed")
    if settings.trust == "local" and settings.unit != "example":
        why = "Under local trust the receiver knows each message's sender, so sampling hides nobody"
        return Verdict(
            "broken" if amplifies else "holds",
            f"{why}, but amplification by sampling is claimed." if amplifies else f"{why}.",
            scheduled=True,
        )
    if sampler is None:
        return Verdict(
            "conditional",
            "The sampler is not stated, so the figure assumes no amplification; a unit must take "
            "part at most once in each step.",
            scheduled=True,
            missing=("sampler",),
        )
    if sampler == "poisson":
        if accounted == "fixed":
            return Verdict("conditional", "Poisson samples are accounted as fixed-size batches.")
        if settings.participations is not None:
            return Verdict(
                "conditional",
                "A cap on participations makes the samples depend on each other, so the figure does "
                "without amplification.",
                scheduled=True,
            )
        return Verdict(
            "holds", "Poisson sampling amplifies, as long as it is secret who takes part."
        )
    what = {
        "shuffle": "Shuffled or fixed batches, in which each unit takes part once per epoch,",
        "fixed": "Batches of a fixed size",
        "all": "Releases in which all units take part",
    }[sampler]
    if accounted == "poisson" or (accounted == "fixed" and sampler != "fixed"):
        return Verdict(
            "broken",
            f"{what} are accounted as {'Poisson' if accounted == 'poisson' else 'fixed-size'} "
            "samples, but lack the amplification of such samples.",
            scheduled=sampler != "all",
        )
    if accounted == "fixed":
        return Verdict(
            "conditional",
            "Amplification of fixed-size batches is proven for replace-one at twice the "
            "sensitivity; the figure here assumes no amplification.",
            scheduled=True,
        )
    unstated = accounted is None and settings.epsilon is not None
    return Verdict(
        "conditional" if unstated else "holds",
        f"{what} are accounted for without amplification."
        if not unstated
        else f"{what} have no amplification; the accounting behind the stated epsilon is unknown.",
        scheduled=sampler != "all",
        missing=("accounted_as",) if unstated else (),
    )


@rule
def last_batch(settings: Settings) -> Verdict | None:
    """Judge whether batches are left out by a rule that depends on the data."""
    if not settings.drop_last:
        return None
    if settings.sampler == "poisson":
        return Verdict(
            "broken",
            "A Poisson batch that is left out because of its size makes the schedule depend on who "
            "takes part.",
            scheduled=True,
        )
    return Verdict(
        "holds",
        "Leaving out the last batch only lowers the number of participations, if the size of the "
        "data is public.",
    )


@rule
def denominator(settings: Settings) -> Verdict | None:
    """Judge whether the denominator is public."""
    if settings.denominator == "expected":
        return Verdict("holds", "The sum is divided by a public number.")
    if settings.denominator is None:
        return Verdict(
            "conditional",
            "The denominator is not stated: it must be public, such as the expected batch size.",
            missing=("denominator",),
        )
    if settings.sampler == "poisson":
        return Verdict(
            "broken",
            "Averages over the realised batch size reveal that size, which differs between "
            "neighbours by add-remove.",
            scheduled=True,
        )
    return Verdict(
        "conditional",
        "The realised batch size must be the public one in every step; a smaller batch has less "
        "noise than accounted if the noise is scaled for the full size.",
        scheduled=True,
    )


@rule
def weights(settings: Settings) -> Verdict | None:
    """Judge whether the units' weights are public."""
    if settings.weights == "examples":
        return Verdict(
            "broken",
            "Weights by numbers of examples are private, and a unit of large weight moves the mean "
            "by more than the bound over the number of units.",
            bound=False,
        )
    if settings.weights is None and (settings.unit == "example" or settings.trust == "local"):
        return None
    if settings.weights is None:
        why = "The weights of the clients are not stated: they must be equal."
        return Verdict("conditional", why, missing=("weights",))
    return Verdict("holds", "All units have the same weight.")


@rule
def clipping(settings: Settings) -> Verdict | None:
    """Judge whether each unit's contribution is bounded."""
    if settings.clipping == "unit":
        return Verdict("holds", "Each unit's contribution is bounded before the noise.")
    if settings.clipping in _UNBOUNDED:
        return Verdict(
            "broken",
            f"{_UNBOUNDED[settings.clipping]}: one unit can change the whole release.",
            bound=False,
        )
    if settings.clipping == "rescaled":
        # clip(g / n) and clip(g / (n + 1)) differ by at most bound / (n + 1), for each of n units
        varies = settings.sampler in (None, "poisson")
        return Verdict(
            "broken" if varies else "holds",
            "Contributions are scaled with the realised batch size before they are bounded"
            + (", so one unit changes all contributions by up to the bound." if varies else "."),
            factor=0.5 if varies else 1.0,
        )
    if settings.clipping == "microbatch":
        return Verdict(
            "broken",
            "Means of microbatches are bounded: one example can reverse a microbatch's mean, which "
            "moves it by twice the bound, and sampling does not act on single examples.",
            factor=0.5,
            scheduled=True,
        )
    if settings.clipping == "adaptive-late":
        return Verdict(
            "broken",
            "The noise is scaled with the next round's bound, but the contributions have this "
            "round's bound: if the bound falls, there is too little noise.",
            bound=False,
        )
    return _adaptive(settings) if settings.clipping == "adaptive" else None


_UNBOUNDED = {
    "batch": "Only the batch's mean is bounded",
    "none": "Nothing is bounded",
    "mixed": "Each contribution depends on the other units of its batch",
}


def _adaptive(settings: Settings) -> Verdict:
    """Judge a bound that follows a noisy count with sensitivity 1, which is divided by a number
    that is not public.
    """
    noise, count_std = settings.noise_multiplier, settings.count_std
    if count_std is None or noise is None:
        return Verdict(
            "conditional",
            "The bound follows the data: its count must be noisy and accounted for.",
            bound=False,
            missing=("count_std",) if count_std is None else (),
        )
    # the joint release of a sum with sensitivity 1 and noise `noise`, and a count with sensitivity
    # 1 and noise `count_std`; Opacus gives the sum more noise than `noise`, because it charges the
    # count for a sensitivity of 1/2
    return Verdict(
        "conditional",
        "The bound follows a noisy count that is not centred, so its sensitivity is 1 and not 1/2. "
        "The count is divided by a batch size that is not public.",
        factor=1 / math.hypot(1, noise / count_std),
        scheduled=True,
        bound=settings.mechanism == "gaussian",
    )


@rule
def scale_of_the_noise(settings: Settings) -> Verdict | None:
    """Judge whether the noise is scaled for the quantity, sum or mean, to which it is added."""
    size: float | None = settings.batch_size
    if size is None and settings.sampling_rate and settings.population:
        size = settings.sampling_rate * settings.population
    if settings.noise_on == settings.noise_scale:
        return _noise_size(settings.noise_size, size)
    public = settings.denominator == "expected"
    missing = () if size else ("batch_size",)
    if settings.noise_on == "mean":
        return Verdict(
            "conditional",
            "Noise of the sum's scale is added to the mean: there is more noise, by a factor of "
            "the batch size, and the stated epsilon is that of another mechanism.",
            factor=float(max(1, math.floor(size))) if size and public else 1.0,
            missing=missing,
        )
    return Verdict(
        "broken",
        "Noise of the mean's scale is added to the sum: there is too little noise, by a "
        "factor of the batch size.",
        factor=1 / math.ceil(size) if size else 1.0,
        bound=bool(size) and (public or settings.sampler != "poisson"),
        missing=missing,
    )


def _noise_size(scaled: int | None, size: float | None) -> Verdict | None:
    """Judge noise that is scaled for a mean over `scaled` units, but is added to a mean over `size`
    units.
    """
    if scaled is None or scaled == size:
        return None
    if size is None:
        why = f"The noise is scaled for the mean of {scaled} units, and their number is not stated."
        return Verdict("conditional", why, bound=False, missing=("batch_size",))
    why = f"The noise is scaled for the mean of {scaled} units, and a step has {size:g}: there is "
    few = size < scaled
    why += "too little noise." if few else "more noise than the stated epsilon needs."
    return Verdict("broken" if few else "conditional", why, factor=size / scaled)


@rule
def repeated_noise(settings: Settings) -> Verdict | None:
    """Judge whether noise is added exactly once."""
    if settings.noise_additions == 1:
        return None
    # under local trust the receiver may know the noise of the other clients
    counts = settings.mechanism == "gaussian" and settings.trust == "central"
    return Verdict(
        "conditional",
        f"Independent noise is added {settings.noise_additions} times: this is more private than "
        "stated, and the stated epsilon is that of another mechanism.",
        factor=math.sqrt(settings.noise_additions) if counts else 1.0,
    )


@rule
def layers(settings: Settings) -> Verdict | None:
    """Judge whether the epsilons of the layers were combined validly."""
    if settings.layers is None or settings.layers == 1:
        return None
    if settings.layer_claim == "joint":
        return Verdict("holds", "The noise is relative to the bound of all layers together.")
    parallel = settings.layer_claim == "parallel"
    return Verdict(
        "broken" if parallel else "holds",
        "Each layer's epsilon is stated for the model, but all layers come from the same data."
        if parallel
        else "The layers' epsilons are added, which is valid; their joint epsilon is smaller.",
        # the squares of l2 norms add up over layers; for Laplace noise, the l1 norms themselves add
        # up
        factor=1 / (settings.layers if settings.mechanism == "laplace" else settings.layers**0.5),
    )


@rule
def neighbours(settings: Settings) -> Verdict | None:
    """Judge whether the stated neighbouring relation is the relation of the proof."""
    if settings.relation == "replace-one":
        return Verdict(
            "conditional",
            "Replacing a unit moves the sum by twice the bound: the noise multiplier must be "
            "relative to that.",
            units=2,
        )
    local = settings.trust == "local" and settings.unit != "example"
    scheduled = settings.sampler in ("shuffle", "fixed") or local
    if settings.relation == "add-remove" and scheduled:
        return Verdict(
            "conditional",
            "With this schedule a further unit moves other units between batches: the proof is for "
            "zero-out, where the unit's contributions become zero.",
        )
    return None


@rule
def people(settings: Settings) -> Verdict | None:
    """Judge whether each person has only one unit."""
    if settings.units_per_person == 1:
        return None
    return Verdict(
        "broken",
        f"The accounting protects one {settings.unit}, but a person has up to "
        f"{settings.units_per_person}.",
        units=settings.units_per_person,
    )
