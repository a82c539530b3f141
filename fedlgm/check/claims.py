"""Rules that judge what is claimed about a run: which releases epsilon covers, the accountant,
delta, and searches.
"""

from __future__ import annotations

from dataclasses import replace

from fedlgm.check.rules import rule
from fedlgm.check.settings import LEAST_NOISE, MOST_NOISE, Settings
from fedlgm.check.verdict import Status, Verdict


@rule
def scope(settings: Settings) -> Verdict | None:
    """Judge whether the stated epsilon covers the whole run."""
    count = settings.participation_count
    if settings.stated_for == "part":
        return Verdict(
            "broken",
            "The accountant starts anew during the run: epsilon does not cover the earlier steps.",
        )
    if settings.epsilon is None or settings.stated_for in (None, "run"):
        return None
    if settings.stated_for == "round" and count is None:
        why = "The stated epsilon is that of one round, and the number of rounds is not stated."
        return Verdict("conditional", why, missing=("steps",))
    single = count == 1 if settings.stated_for == "round" else (settings.epochs or 2) <= 1
    return Verdict(
        "holds" if single else "broken",
        f"The stated epsilon is that of one {settings.stated_for}"
        + (", and there is only one." if single else "; the run has more than one."),
    )


@rule
def accounted_values(settings: Settings) -> Verdict | None:
    """Judge whether epsilon was computed for the values of the run."""
    if not settings.accounted:
        return None
    claim = settings.as_accounted()
    pairs = {
        "noise multiplier": (claim.noise_multiplier, settings.noise_multiplier),
        "rate": (claim.rate, settings.rate),
        "number of steps": (claim.releases, settings.releases),
    }
    unequal = [
        f"{name} of {claimed:.4g} instead of {actual:.4g}"
        for name, (claimed, actual) in pairs.items()
        if claimed and actual and abs(claimed / actual - 1) > 1e-3
    ]
    if not unequal:
        return Verdict("holds", "Epsilon was computed for the values of the run.")
    less, more = (
        # If no multiplier is stated, any multiplier shows which of the two epsilons is larger.
        _cost(replace(values, noise_multiplier=values.noise_multiplier or 1.0), settings)
        for values in (claim, settings)
    )
    status: Status = "broken"
    if less is not None and more is not None and less >= 0.99 * more:
        status = "holds" if less <= 1.01 * more else "conditional"
    same = ", which costs the same" if status == "holds" else ""
    return Verdict(status, f"Epsilon was computed for a {' and a '.join(unequal)}{same}.")


def _cost(values: Settings, settings: Settings) -> float | None:
    """Compute the epsilon of Gaussian noise, or of Laplace noise if the mechanism adds such noise,
    with the given values under the sampling that the accounting assumed. Return None if a value is
    missing or the noise is out of range.
    """
    from fedlgm.privacy.accounting import composed_epsilon
    from fedlgm.privacy.events import gaussian_event, laplace_event

    amplified = settings.accounted_as == "poisson"
    count = values.releases if amplified else values.participation_count
    rate = values.rate if amplified else 1.0
    noise = values.noise_multiplier or 0.0
    if count is None or rate is None or not LEAST_NOISE <= noise <= MOST_NOISE:
        return None
    if settings.mechanism != "laplace":
        return composed_epsilon([(gaussian_event(noise, rate), count)], settings.delta or 1e-5)
    if not amplified:
        return count / noise
    return composed_epsilon([(laplace_event(1 / noise, rate), count)], settings.delta or 1e-5)


def _renyi(settings: Settings, rate: float, count: int, orders: tuple[float, ...]) -> float:
    """Compute the epsilon of Gaussian releases from the given Renyi orders."""
    from dp_accounting.rdp import RdpAccountant

    from fedlgm.privacy.accountants import quiet
    from fedlgm.privacy.events import gaussian_event

    event = gaussian_event(settings.noise_multiplier or 0.0, rate)
    with quiet():
        accountant = RdpAccountant(orders=orders).compose(event, count)
        return float(accountant.get_epsilon(settings.delta or 0.0))


@rule
def orders(settings: Settings) -> Verdict | None:
    """Judge whether the accounting's Renyi orders suffice for a nearly least epsilon."""
    count = settings.releases if settings.sampler == "poisson" else settings.participation_count
    noise = settings.noise_multiplier or 0.0
    computable = settings.mechanism == "gaussian" and LEAST_NOISE <= noise <= MOST_NOISE
    if settings.orders is None or count is None or not computable or not settings.delta:
        return None
    rate = (settings.rate or 1.0) if settings.accounted_as == "poisson" else 1.0
    dense = (*settings.orders, *(1 + 10 ** (step / 20) for step in range(-40, 61)))
    few = _renyi(settings, rate, count, settings.orders)
    best = _renyi(settings, rate, count, dense)
    if few <= best + max(0.01, 0.02 * best):  # small differences do not matter
        return Verdict("holds", "The Renyi orders are sufficient.")
    return Verdict(
        "conditional",
        f"The Renyi orders are too few: they give {few:.4g}, while more orders give {best:.4g}. "
        "The larger epsilon is valid, but is not the least that this noise allows.",
    )


@rule
def accountant(settings: Settings) -> Verdict | None:
    """Judge whether the accounting gives an upper bound on epsilon."""
    if settings.delta == 0 and settings.mechanism == "gaussian":
        return Verdict("broken", "Gaussian noise has no epsilon at delta = 0.", bound=False)
    if settings.delta == 0 and settings.accountant in ("rdp", "gdp"):
        return Verdict("broken", f"The {settings.accountant} accountant needs a delta above 0.")
    if settings.accountant == "gdp":
        return Verdict(
            "conditional",
            "The central limit theorem gives an approximation, which can lie below the truth.",
        )
    if settings.accountant == "classical":
        low = settings.epsilon is not None and settings.epsilon < 1
        return Verdict(
            "holds" if low else "conditional",
            "The formula sqrt(2 ln(1.25 / delta)) / epsilon is proven for epsilon below 1"
            + ("." if low else ", and false for large epsilon."),
        )
    return None


@rule
def delta(settings: Settings) -> Verdict | None:
    """Judge whether delta is small enough."""
    if settings.delta is None:
        return None
    if settings.population is None:
        return Verdict(
            "conditional", "Delta must lie below 1 / population.", missing=("population",)
        )
    if settings.delta * settings.population >= 1:
        return Verdict(
            "broken",
            f"Delta is at least 1 / {settings.population:,}: publishing the data of one random unit "
            "would satisfy it.",
        )
    return Verdict("holds", "Delta is below 1 / population.")


@rule
def search(settings: Settings) -> Verdict | None:
    """Judge whether the stated epsilon covers all runs on the data."""
    if settings.runs == 1:
        return None
    charged = settings.search_charged
    return Verdict(
        "holds" if charged else "conditional" if charged is None else "broken",
        f"{settings.runs} runs on the same data "
        + ("are" if charged else "must be" if charged is None else "are not")
        + " covered by the stated epsilon; the figure here covers all of them at this noise.",
        times=settings.runs,
        missing=("search_charged",) if charged is None else (),
    )
