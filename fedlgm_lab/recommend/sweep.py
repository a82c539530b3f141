"""Noise and signal-to-noise ratio of a recipe at several budgets and populations, without
training.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Sequence
from typing import NotRequired, TypedDict

from rich.console import Group
from rich.text import Text

from fedlgm.errors import ConfigError, FedlgmError
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.summaries.planning import plan_report_of
from simulations.summaries.terminal import number
from simulations.tables import table

EPSILONS = (1.0, 2.0, 4.0, 8.0)
"""Budgets of a sweep."""
CLIENTS = (100, 300, 1000, 3000, 10000)
"""Populations of a sweep."""
_WIDTH = 30
_MOST_COLUMNS = 4  # layers beyond which the table shows only the least and the largest SNR


class SweepRow(TypedDict):
    """One setting of a sweep.

    Attributes:
        epsilon, clients, delta: the setting.
        noise_multiplier: calibrated z, the noise of a release divided by the bound of a
            contribution.
        expected_cohort: q N, the divisor of a sum.
        noises_in_sum: number k of releases whose independent noise a sum of q N contributions
            contains; 1 under central trust.
        noise_on_mean: z sqrt(k) / (q N), the standard deviation of the mean's noise divided by the
            bound.
        snr: SNR_j of every layer, by its name.
        refused: reason why this setting has no plan; the figures above are then missing.
    """

    epsilon: float
    clients: int
    delta: float
    noise_multiplier: NotRequired[float]
    expected_cohort: NotRequired[float]
    noises_in_sum: NotRequired[float]
    noise_on_mean: NotRequired[float]
    snr: NotRequired[dict[str, float]]
    refused: NotRequired[str]


class SweepReport(TypedDict):
    """A recipe at all settings of a sweep.

    Attributes:
        recipe, mechanism, trust: the planned run.
        delta: how the delta of a row is chosen, in words.
        rows: one for each budget and population.
    """

    recipe: str
    mechanism: str
    trust: str
    delta: str
    rows: list[SweepRow]


def sweep_report(recipe: str | None = None, overrides: Iterable[str] = ()) -> SweepReport:
    """Plan a recipe at epsilon 1 to 8 and 100 to 10,000 clients, without training.

    Every row is the plan of the recipe with this `privacy.epsilon`, `federation.clients` and
    `privacy.delta`. For a setting that the recipe does not permit, the row has the reason.

    Args:
        recipe: name of a bundled recipe, a TOML file, or None for the default recipe.
        overrides: changes as "section.key=value".

    Raises:
        ConfigError: the recipe is unknown or protects no clients, an override sets a key that the
            sweep varies, or no setting has a plan.

    Example:
        >>> report = sweep_report("digits", ["federation.rounds=1", "federation.rate=1.0"])
        >>> row = report["rows"][0]
        >>> len(report["rows"]), row["clients"], row["noise_on_mean"] == row["noise_multiplier"] / 100
        (20, 100, True)
    """
    changes = list(overrides)
    if any(change.partition("=")[0].strip() == "privacy.noise_multiplier" for change in changes):
        raise ConfigError(
            "--sweep varies privacy.epsilon, from which the noise follows: leave out --set "
            "privacy.noise_multiplier, or leave out --sweep"
        )
    for key in ("privacy.epsilon", "federation.clients"):
        if any(change.partition("=")[0].strip() == key for change in changes):
            raise ConfigError(f"--sweep varies {key}: leave out --set {key}, or leave out --sweep")
    with warnings.catch_warnings():
        # warnings about the delta, which suits the recipe's population and not the populations of
        # the rows
        warnings.simplefilter("ignore")
        base = recipes.load(recipe, changes)
        if base.unit != "client":
            raise ConfigError(
                f"--sweep varies the number of protected clients, but {base.name} protects "
                f"{base.unit}s (privacy.unit): leave out --sweep"
            )
        rows = [
            _row(recipe, changes, base, epsilon, clients)
            for epsilon in EPSILONS
            for clients in CLIENTS
        ]
    reasons = [row.get("refused", "") for row in rows]
    if all(reasons):
        raise ConfigError(reasons[0])
    return {
        "recipe": base.name,
        "mechanism": base.mechanism.name,
        "trust": base.privacy.trust,
        "delta": f"the recipe's {base.privacy.delta:g} where it is below 1/clients, else "
        "0.1/clients",
        "rows": rows,
    }


def _row(
    recipe: str | None, changes: list[str], base: Recipe, epsilon: float, clients: int
) -> SweepRow:
    """Describe the plan of a setting, or the reason why there is none."""
    delta = base.privacy.delta if base.privacy.delta < 1 / clients else 0.1 / clients
    row: SweepRow = {"epsilon": epsilon, "clients": clients, "delta": delta}
    try:
        setting = [
            f"privacy.epsilon={epsilon!r}",
            f"federation.clients={clients}",
            f"privacy.delta={delta!r}",
        ]
        assembly = Assembly(recipes.load(recipe, [*changes, *setting]), planned=True)
        report = plan_report_of(assembly)
    except FedlgmError as error:
        return {**row, "refused": str(error)}
    cohort, multiplier = assembly.recipe.sampling.expected, report["noise_multiplier"]
    parties = assembly.recipe.noised_by.noises_in_sum(cohort)
    row["noise_multiplier"], row["expected_cohort"], row["noises_in_sum"] = (
        multiplier,
        cohort,
        parties,
    )
    row["noise_on_mean"] = multiplier * math.sqrt(parties) / cohort
    row["snr"] = {layer["layer"]: layer["snr"] for layer in report["layers"]}
    return row


def picture(rows: Sequence[SweepRow]) -> list[str]:
    """Draw the noise on the mean as bars of text on a logarithmic scale, one line per setting.

    Example:
        >>> row = {"epsilon": 1.0, "clients": 100, "delta": 1e-5, "noise_on_mean": 0.1}
        >>> for line in picture([row, {**row, "clients": 1000, "noise_on_mean": 0.01}]):
        ...     print(line)
        epsilon 1,    100 clients ############################## 0.1
        epsilon 1,  1,000 clients #                              0.01
    """
    settings = [row for row in rows if "noise_on_mean" in row]
    logs = [math.log(row["noise_on_mean"]) for row in settings]
    wide = (_WIDTH - 1) / max(max(logs) - min(logs), 1e-9) if logs else 0.0
    return [
        f"epsilon {row['epsilon']:g}, {row['clients']:>6,} clients "
        f"{'#' * (1 + round(wide * (value - min(logs)))):<{_WIDTH}} {number(row['noise_on_mean'])}"
        for row, value in zip(settings, logs, strict=True)
    ]


def sweep_table(report: SweepReport) -> Group:
    """Lay out the settings of a sweep, then an explanation of the columns."""
    layers = next((list(row["snr"]) for row in report["rows"] if "snr" in row), [])
    few = len(layers) <= _MOST_COLUMNS
    ratios = [f"SNR {layer}" for layer in layers] if few else ["least SNR_j", "largest SNR_j"]
    columns = ("epsilon", "clients", "delta", "z", "noise on mean", *ratios)
    settings = table(f"{report['recipe']}: one round of {report['mechanism']}", columns)
    refused = []
    for row in report["rows"]:
        cells = [f"{row['epsilon']:g}", f"{row['clients']:,}", f"{row['delta']:g}"]
        if "snr" in row:
            snr = list(row["snr"].values())
            cells += [number(row["noise_multiplier"]), number(row["noise_on_mean"])]
            cells += [f"{value:.3e}" for value in (snr if few else [min(snr), max(snr)])]
        else:
            refused.append(
                f"refused at epsilon {row['epsilon']:g}, {row['clients']:,} clients: "
                f"{row['refused']}"
            )
            cells += ["refused"]
        settings.add_row(*cells)
    notes = [
        f"delta: {report['delta']}",
        (
            "noise on mean: its std over the bound of a contribution, z sqrt(k) / (q N): "
            f"{_noises(report)}"
        ),
        *refused,
        "noise on mean:",
        *picture(report["rows"]),
    ]
    return Group(settings, *map(Text, notes))


def _noises(report: SweepReport) -> str:
    """State in words how many releases' noise a sum contains."""
    counts = {row["noises_in_sum"] for row in report["rows"] if "noises_in_sum" in row}
    words = (
        f"k = {min(counts):g}" + (f" to {max(counts):g}" if len(counts) > 1 else "")
        if counts
        else "k"
    )
    return f"{words} releases' noise in a sum of q N contributions, under {report['trust']} trust"
