"""The report's section on attackers: how often an attacker can be right about a unit of the run."""

from __future__ import annotations

from typing import Any

import numpy as np

from fedlgm.privacy import AttackRates
from fedlgm.privacy.attackers import percent
from fedlgm_lab.reports.measured import Measurements
from fedlgm_lab.reports.page import Table
from fedlgm_lab.reports.pictures import Picture
from fedlgm_lab.reports.svg import drawing, to_svg

_ALARMS = np.logspace(-4, 0, 161)
_GROUPS = (1, 2, 5, 10)


def bounds_table(rates: AttackRates, unit: str) -> Table:
    """Make the table of the bounds on attacks, for one unit and for groups of units.

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
    return Table(columns, rows, "Upper bounds on every attack")


def draw_curve(rates: AttackRates, units: str, measured: Measurements | None = None) -> Picture:
    """Draw the largest share of units that an attack can find, against the attack's share of false
    alarms.
    """
    bounds = np.array([rates.tpr(share) for share in _ALARMS])
    with drawing() as figure:
        axes = figure.add_subplot()
        axes.set_axisbelow(True)
        axes.grid(alpha=0.9)
        axes.plot(_ALARMS, bounds, label="bound on every attack")
        axes.plot(_ALARMS, _ALARMS, ":", label="guessing")
        if measured is not None:
            _draw_measured(axes, measured)
        axes.set_xscale("log")
        axes.set_xlabel("false alarms")
        axes.set_ylabel(f"{units} found")
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_major_formatter(lambda share, _: f"{100 * share:g}%")
        axes.set_ylim(0, 1)
        axes.legend(loc="best")
        svg = to_svg(figure)
    alt = f"Bound on the share of {units} that an attack finds: {rates.sentence(units)}."
    return Picture("What an attacker can find", alt, svg)


def _draw_measured(axes: Any, measured: Measurements) -> None:
    """Draw the points of the attacks with their intervals, and the line of the audit."""
    for name in dict.fromkeys(rate.attack for rate in measured.rates):
        rates = [rate for rate in measured.rates if rate.attack == name]
        tpr = np.array([rate.tpr for rate in rates])
        ends = np.array([[rate.low for rate in rates], [rate.high for rate in rates]])
        axes.errorbar(
            [rate.fpr for rate in rates], tpr, np.abs(ends - tpr), fmt="o", capsize=3, label=name
        )
    line = measured.line(_ALARMS)
    if line is not None:
        axes.plot(_ALARMS, line, "--", label="reached by some attack (audit)")
