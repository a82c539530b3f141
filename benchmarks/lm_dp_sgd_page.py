"""Writes the figures of `benchmarks.lm_dp_sgd` to docs/results/lm-dp-sgd.md and its page of data;
missing: dashes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import lm_dp_sgd as bench
from benchmarks.neighbouring_rates import three
from benchmarks.pages import put, spread, table
from fedlgm_lab.studies.statistics import difference, holm

PAGE = Path(__file__).parents[1] / "docs" / "results" / "lm-dp-sgd.md"
DATA_PAGE = PAGE.parent / "data" / PAGE.name
LABELS = {
    "sgd": "SGD, no privacy",
    "dp-sgd": "DP-SGD",
    "auto-s": "Auto-S (NSGD)",
    "dp-psac": "DP-PSAC",
    "lm public": "LM-DP-SGD, public",
    "lm stale": "LM-DP-SGD, stale",
    "lm privatised": "LM-DP-SGD, privatised",
    "lm bias": "LM-DP-SGD, public w* (App. D.2)",
    "lm published": "LM-DP-SGD, published",
    "lm published bias": "LM-DP-SGD, published, w* of the batch (App. D.2)",
}
Values = dict[str, Any]


def write(values: Values) -> None:
    """Write the tables that have figures between the page's markers."""
    tables = {
        "accuracy": (PAGE, accuracy, "run "),
        "changes": (PAGE, changes, "run "),
        "search": (DATA_PAGE, search, "search "),
        "membership": (DATA_PAGE, membership, "run "),
        "risk": (PAGE, risk, "risk "),
        "bias": (DATA_PAGE, bias, "run "),
        "steps": (DATA_PAGE, steps, "step "),
    }
    for name, (page, tables_of, prefix) in tables.items():
        if any(key.startswith(prefix) for key in values):
            put(page, name, tables_of(values))


def runs(values: Values, style: str) -> list[Values]:
    return [
        values[f"run {style} {seed}"] for seed in bench.SEEDS if f"run {style} {seed}" in values
    ]


def percent(shares: Sequence[float]) -> str:
    """Mean and spread of shares in per cent; a dash for none."""
    return spread(shares, 100, 1) or "-"


def _epsilon(value: Any) -> str:
    return "none" if value is None else ("infinite" if value == "inf" else f"{value:.2f}")


def accuracy(values: Values) -> str:
    rows = []
    for style in bench.STYLES:
        found = runs(values, style)
        first = found[0] if found else {}
        rows.append([
            LABELS[style],
            f"{first['lr']:g}" if found else "-",
            "-" if style == "sgd" or not found else f"{first['claimed']:.2f}",
            _epsilon(first.get("epsilon")) if found else "-",
            percent([run["accuracy"] for run in found]),
            percent([run["train_accuracy"] for run in found]),
            percent([max(run["membership"].values()) for run in found]),
            str(len(found)),
        ])  # fmt: skip
    return table(
        [
            "method",
            "lr",
            "epsilon claimed",
            "proven",
            "test accuracy",
            "on its members",
            "peak layer MIA",
            "seeds",
        ],
        rows,
    )


def changes(values: Values) -> str:
    """Accuracy of each private method minus DP-SGD's: paired by seed at the best rates, and at
    their neighbours.
    """
    styles = [style for style in bench.STYLES[2:] if runs(values, style)]
    base = bench.curve(values, "dp-sgd")
    tests = [
        difference(*([run["accuracy"] for run in runs(values, name)] for name in (style, "dp-sgd")))
        for style in styles
    ]
    rows = []
    for style, test, p in zip(styles, tests, holm([test.p for test in tests]), strict=True):
        below, _, above = three(bench.curve(values, style), base, lower_is_better=False)
        beside = [below, above]
        signs = {value > 0 for value in (test.mean, *beside) if value is not None}
        rows.append(
            [
                LABELS[style],
                f"{100 * test.mean:+.2f} ({100 * test.low:+.2f} to {100 * test.high:+.2f})",
                f"{p:.2g}",
                *("edge" if value is None else f"{100 * value:+.2f}" for value in beside),
                "not decided"
                if None in beside or p >= 0.05
                else "holds"
                if len(signs) == 1
                else "does not hold",
            ]
        )
    return table(
        [
            "method minus DP-SGD",
            "points, 95 % interval",
            "p",
            "one rate below",
            "one rate above",
            "",
        ],
        rows,
    )


def search(values: Values) -> str:
    """Mean test accuracy of the search by rate, in per cent."""
    rows = [
        [LABELS[style], *(percent(found) for found in bench.searched(values, style).values())]
        for style in bench.STYLES
    ]
    return table(["method", *(f"lr {rate:g}" for rate in bench.RATES)], rows)


def membership(values: Values) -> str:
    baseline = _by_layer(runs(values, "sgd"))
    rows = [
        [LABELS[style], baseline, _by_layer(runs(values, style)), _peak(runs(values, style))]
        for style in bench.STYLES
        if style != "sgd"
    ]
    return table(
        ["method", "MIA under SGD, by layer", "under the method, by layer", "largest"], rows
    )


def _layers(found: list[Values]) -> dict[str, float]:
    return {
        layer: statistics.mean(run["membership"][layer] for run in found)
        for layer in found[0]["membership"]
    }


def _by_layer(found: list[Values]) -> str:
    return ", ".join(f"{100 * rate:.1f}" for rate in _layers(found).values()) if found else "-"


def _peak(found: list[Values]) -> str:
    return f"{100 * max(_layers(found).values()):.1f}" if found else "-"


def risk(values: Values) -> str:
    rows = []
    for name in ("fashion-mnist", "digits"):
        found = values.get(f"risk {name}")
        if found:
            layers = ", ".join(row["layer"] for row in found)
            columns = [
                ", ".join(f"{scale * row[key]:.{digits}f}" for row in found)
                for key, scale, digits in (
                    ("training_error", 100, 1),
                    ("held_out_error", 100, 1),
                    ("strength", 1, 2),
                )
            ]
            rows.append([name, layers, *columns])
    return table(
        [
            "shadow set",
            "layers",
            "error on its training set (paper), %",
            "held out, %",
            "strengths",
        ],
        rows,
    )


def bias(values: Values) -> str:
    rows = []
    for style in bench.STYLES[1:]:
        series = [run["bias"] for run in runs(values, style) if run["bias"]]
        looks = (
            [spread(look, 1, 2) for look in zip(*series, strict=True)]
            if series
            else ["-"] * bench.LOOKS
        )
        rows.append([LABELS[style], *looks])
    places = [f"step {(i + 1) * bench.STEPS // bench.LOOKS}" for i in range(bench.LOOKS)]
    return table(["method", *places], rows)


def steps(values: Values) -> str:
    def cells(key: str, form: Callable[[float], str]) -> list[list[str]]:
        rows = []
        for network, (_, _, _, batch) in bench.NETWORKS.items():
            found = [values.get(f"step {network} {style}") for style in bench.STEPPED]
            if any(found):
                rows.append(
                    [
                        f"{network}, batch {batch}",
                        *("-" if cell is None else form(cell[key]) for cell in found),
                    ]
                )
        return rows

    header = ["SGD", "DP-SGD", "Auto-S", "DP-PSAC", "LM-DP-SGD, sound", "published"]
    times = table(["ms per step", *header], cells("seconds", lambda value: f"{1000 * value:.0f}"))
    memory = table(["peak MB", *header], cells("megabytes", lambda value: f"{value:.0f}"))
    return f"{times}\n\n{memory}"
