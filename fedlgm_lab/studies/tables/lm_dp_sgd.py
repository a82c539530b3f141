"""Tables that compare LM-DP-SGD with DP-SGD, Auto-S and DP-PSAC (Figures 2 and 4, Tables 3 and 5 of
the LM-DP-SGD paper). A dash stands for a missing figure. `lm_dp_sgd_runs` makes the runs.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

from fedlgm_lab.studies.statistics import difference, holm
from fedlgm_lab.studies.tables import lm_dp_sgd_runs as runs_of
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.neighbouring_rates import three
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.store import Values

Figures = dict[str, Any]
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


def runs(values: Figures, style: str) -> list[Figures]:
    return [
        values[f"run {style} {seed}"] for seed in runs_of.SEEDS if f"run {style} {seed}" in values
    ]


def percent(shares: Sequence[float]) -> str:
    """Format the mean and the spread of shares in per cent; a dash if there are no shares."""
    return spread(shares, 100, 1) or "-"


def _epsilon(value: Any) -> str:
    return "none" if value is None else ("infinite" if value == "inf" else f"{value:.2f}")


def accuracies(values: Figures) -> str:
    rows = []
    for style in runs_of.STYLES:
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


def changes(values: Figures) -> str:
    """Make the table of each private method's accuracy minus the accuracy of DP-SGD, paired by
    seed, at the best learning rates and at their neighbours.
    """
    styles = [style for style in runs_of.STYLES[2:] if runs(values, style)]
    base = runs_of.curve(values, "dp-sgd")
    tests = [
        difference(*([run["accuracy"] for run in runs(values, name)] for name in (style, "dp-sgd")))
        for style in styles
    ]
    rows = []
    for style, test, p in zip(styles, tests, holm([test.p for test in tests]), strict=True):
        below, _, above = three(runs_of.curve(values, style), base, lower_is_better=False)
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


def search(values: Figures) -> str:
    """Make the table of the search: mean test accuracy in per cent by method and learning rate."""
    rows = [
        [
            LABELS[style],
            *(percent(found) for found in runs_of.accuracies_by_rate(values, style).values()),
        ]
        for style in runs_of.STYLES
    ]
    return table(["method", *(f"lr {rate:g}" for rate in runs_of.RATES)], rows)


def membership(values: Figures) -> str:
    baseline = _by_layer(runs(values, "sgd"))
    rows = [
        [LABELS[style], baseline, _by_layer(runs(values, style)), _peak(runs(values, style))]
        for style in runs_of.STYLES
        if style != "sgd"
    ]
    return table(
        ["method", "MIA under SGD, by layer", "under the method, by layer", "largest"], rows
    )


def _layers(found: list[Figures]) -> dict[str, float]:
    return {
        layer: statistics.mean(run["membership"][layer] for run in found)
        for layer in found[0]["membership"]
    }


def _by_layer(found: list[Figures]) -> str:
    return ", ".join(f"{100 * rate:.1f}" for rate in _layers(found).values()) if found else "-"


def _peak(found: list[Figures]) -> str:
    return f"{100 * max(_layers(found).values()):.1f}" if found else "-"


def risk(values: Figures) -> str:
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


def bias(values: Figures) -> str:
    rows = []
    for style in runs_of.STYLES[1:]:
        series = [run["bias"] for run in runs(values, style) if run["bias"]]
        looks = (
            [spread(look, 1, 2) for look in zip(*series, strict=True)]
            if series
            else ["-"] * runs_of.LOOKS
        )
        rows.append([LABELS[style], *looks])
    places = [f"step {(i + 1) * runs_of.STEPS // runs_of.LOOKS}" for i in range(runs_of.LOOKS)]
    return table(["method", *places], rows)


TABLES: dict[str, tuple[str, Callable[[Figures], str], str]] = {
    "accuracy": ("lm-dp-sgd.md", accuracies, "run "),
    "changes": ("lm-dp-sgd.md", changes, "run "),
    "search": ("data/lm-dp-sgd.md", search, "search "),
    "membership": ("data/lm-dp-sgd.md", membership, "run "),
    "risk": ("lm-dp-sgd.md", risk, "risk "),
    "bias": ("data/lm-dp-sgd.md", bias, "run "),
}
"""Page of each table, the function that makes the table, and the prefix of the names of its
figures."""


def texts(store: Values) -> Pages:
    """Make the tables that have figures."""
    pages: dict[str, dict[str, str]] = {"lm-dp-sgd.md": {}, "data/lm-dp-sgd.md": {}}
    for name, (page, shown, prefix) in TABLES.items():
        if any(key.startswith(prefix) for key in store.values):
            pages[page][name] = shown(store.values)
    return pages


MAKER = Maker("lm-dp-sgd.json", texts, runs_of.measure, Values, partial=True)
