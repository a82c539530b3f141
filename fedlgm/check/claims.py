"""Rules on what is stated about a run: the scope of its epsilon, accountant, delta, searches."""

from __future__ import annotations

from fedlgm.check.rules import rule
from fedlgm.check.settings import LEAST_NOISE, MOST_NOISE, Settings
from fedlgm.check.verdict import Verdict


@rule
def scope(settings: Settings) -> Verdict | None:
    """Whether the stated epsilon covers the run."""
    count = settings.participation_count
    if settings.epsilon is None or settings.stated_for == "run":
        return None
    if settings.stated_for == "round" and count is None:
        why = "The stated epsilon is that of one round, and the number of rounds is not stated."
        return Verdict("conditional", why, missing=("steps",))
    if settings.stated_for is not None:
        single = count == 1 if settings.stated_for == "round" else (settings.epochs or 2) <= 1
        return Verdict(
            "holds" if single else "broken",
            f"The stated epsilon is that of one {settings.stated_for}"
            + (", and there is only one." if single else "; the run has more than one."),
        )
    if count is None or count < 2 or not _can_compute(settings):
        return None
    rates = {1.0, settings.rate or 1.0}
    for rate in rates:
        if abs(settings.epsilon - _renyi(settings, rate, 1, None)) <= 0.01 * settings.epsilon:
            return Verdict("broken", "The stated epsilon is that of one release, not of the run.")
    return None


def _can_compute(settings: Settings) -> bool:
    noise = settings.noise_multiplier or 0.0
    fits = settings.mechanism == "gaussian" and LEAST_NOISE <= noise <= MOST_NOISE
    return fits and bool(settings.delta)


def _renyi(settings: Settings, rate: float, count: int, orders: tuple[float, ...] | None) -> float:
    """Epsilon of Gaussian releases; by Renyi orders if some are given."""
    from dp_accounting.rdp import RdpAccountant

    from fedlgm.privacy.accountants import quiet
    from fedlgm.privacy.accounting import composed_epsilon
    from fedlgm.privacy.events import gaussian_event

    noise, delta = settings.noise_multiplier or 0.0, settings.delta or 0.0
    event = gaussian_event(noise, rate)
    if orders is None:
        return composed_epsilon([(event, count)], delta)
    with quiet():
        return float(RdpAccountant(orders=orders).compose(event, count).get_epsilon(delta))


@rule
def orders(settings: Settings) -> Verdict | None:
    """Whether the Renyi orders reach the best one."""
    count = settings.releases if settings.sampler == "poisson" else settings.participation_count
    if settings.orders is None or count is None or not _can_compute(settings):
        return None
    rate = (settings.rate or 1.0) if settings.accounted_as == "poisson" else 1.0
    dense = (*settings.orders, *(1 + 10 ** (step / 20) for step in range(-40, 61)))
    few = _renyi(settings, rate, count, settings.orders)
    best = _renyi(settings, rate, count, dense)
    if few <= 1.02 * best:
        return Verdict("holds", "The Renyi orders reach the best one.")
    return Verdict(
        "conditional",
        f"The Renyi orders are too few: they give {few:.4g} where more orders give {best:.4g}. The "
        "larger figure is valid, but not that of this noise.",
    )


@rule
def accountant(settings: Settings) -> Verdict | None:
    """Whether the accounting gives an upper bound."""
    if settings.delta == 0 and settings.mechanism == "gaussian":
        return Verdict("broken", "Gaussian noise has no epsilon at delta = 0.", bound=False)
    if settings.delta == 0 and settings.accountant in ("rdp", "gdp"):
        return Verdict("broken", f"The {settings.accountant} accountant gives no delta of 0.")
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
    """Whether delta is small enough."""
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
    """Whether the stated epsilon covers all runs on the data."""
    if settings.runs == 1:
        return None
    charged = settings.search_charged
    return Verdict(
        "holds" if charged else "conditional" if charged is None else "broken",
        f"{settings.runs} runs on the same data "
        + ("are" if charged else "must be" if charged is None else "are not")
        + " covered by the stated epsilon; the figure is that of all of them at this noise.",
        times=settings.runs,
        missing=("search_charged",) if charged is None else (),
    )
