"""The report's section on attackers: how often one can be right about a unit of the run."""

from __future__ import annotations

from html import escape

import numpy as np

from fedlgm.privacy import AttackRates
from fedlgm.privacy.attackers import percent
from fedlgm_lab.reports import page
from fedlgm_lab.reports.pictures import Picture
from fedlgm_lab.reports.svg import drawing, to_svg

_ALARMS = np.logspace(-4, 0, 161)
_GROUPS = (1, 2, 5, 10)


def describe_attackers(rates: AttackRates, unit: str) -> str:
    """Sentence, curve and table of the bounds on attacks, for one unit and for groups of units.

    Args:
        rates: bounds of the run.
        unit: its unit, such as "client".
    """
    shares = list(rates.figures()["tpr"])
    groups = [(count, rates.of_units(count)) for count in _GROUPS]
    rows = [
        (
            f"{count} {unit}{'s' * (count > 1)}",
            *(percent(group.tpr(float(share))) for share in shares),
            percent(group.advantage),
        )
        for count, group in groups
    ]
    columns = (
        "took part or not",
        *(f"found at {100 * float(share):g} % false alarms" for share in shares),
        "advantage",
    )
    table = page.table(columns, rows, "Upper bounds on every attack")
    told = f"<p>With all that was released, {escape(rates.sentence(f'{unit}s'))}.</p>"
    return told + table + page.gallery([draw_curve(rates, unit)])


def draw_curve(rates: AttackRates, unit: str) -> Picture:
    """The largest share of units that an attack finds, over its share of false alarms."""
    bounds = np.array([rates.tpr(share) for share in _ALARMS])
    with drawing() as figure:
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.grid(alpha=0.9)
        axes.plot(_ALARMS, bounds, label="bound on every attack")
        axes.plot(_ALARMS, _ALARMS, ":", label="guessing")
        axes.set_xscale("log")
        axes.set_xlabel("false alarms")
        axes.set_ylabel(f"{unit}s found")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        axes.set_ylim(0, 1)
        axes.legend(loc="best")
        svg = to_svg(figure)
    alt = f"Bound on the share of {unit}s that an attack finds: {rates.sentence(f'{unit}s')}."
    return Picture("What an attacker can find", alt, svg)
