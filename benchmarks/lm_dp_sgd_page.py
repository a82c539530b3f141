"""docs/results/lm-dp-sgd.md from what `benchmarks.lm_dp_sgd` measured; cells that were not measured are dashes."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks import lm_dp_sgd as bench

PAGE = Path(__file__).parents[1] / "docs" / "results" / "lm-dp-sgd.md"
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
    """Write the tables of which something was measured between the page's markers."""
    tables = {
        "accuracy": (accuracy, "run "),
        "membership": (membership, "run "),
        "risk": (risk, "risk "),
        "bias": (bias, "run "),
        "steps": (steps, "step "),
        "allocations": (allocations, "allocation "),
    }
    text = PAGE.read_text(encoding="utf-8")
    for name, (table, prefix) in tables.items():
        if not any(key.startswith(prefix) for key in values):
            continue
        lines = table(values)
        marker = f"<!-- {name} -->"
        before, _, rest = text.partition(marker)
        _, _, after = rest.partition(marker)
        text = before + marker + "\n" + "\n".join(lines) + "\n" + marker + after
    PAGE.write_text(text, encoding="utf-8")


def runs(values: Values, style: str) -> list[Values]:
    return [values[f"run {style} {seed}"] for seed in bench.SEEDS if f"run {style} {seed}" in values]


def spread(numbers: Sequence[float], scale: float = 100, digits: int = 1) -> str:
    if not numbers:
        return "-"
    mean = f"{scale * statistics.mean(numbers):.{digits}f}"
    return mean if len(numbers) < 2 else f"{mean} ± {scale * statistics.stdev(numbers):.{digits}f}"


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(header)} |", "|" + "---|" * len(header), *(f"| {' | '.join(row)} |" for row in rows)]


def _epsilon(value: Any) -> str:
    return "none" if value is None else ("infinite" if value == "inf" else f"{value:.2f}")


def accuracy(values: Values) -> list[str]:
    rows = []
    for style in bench.STYLES:
        found = runs(values, style)
        first = found[0] if found else {}
        rows.append([
            LABELS[style],
            f"{first['lr']:g}" if found else "-",
            "-" if style == "sgd" or not found else f"{first['claimed']:.2f}",
            _epsilon(first.get("epsilon")) if found else "-",
            spread([run["accuracy"] for run in found]),
            spread([run["train_accuracy"] for run in found]),
            spread([max(run["membership"].values()) for run in found]),
            str(len(found)),
        ])  # fmt: skip
    return _table(
        ["method", "lr", "epsilon claimed", "proven", "test accuracy", "on its members", "peak layer MIA", "seeds"],
        rows,
    )


def membership(values: Values) -> list[str]:
    baseline = _by_layer(runs(values, "sgd"))
    rows = [
        [LABELS[style], baseline, _by_layer(runs(values, style)), _peak(runs(values, style))]
        for style in bench.STYLES
        if style != "sgd"
    ]
    return _table(["method", "MIA under SGD, by layer", "under the method, by layer", "largest"], rows)


def _layers(found: list[Values]) -> dict[str, float]:
    return {layer: statistics.mean(run["membership"][layer] for run in found) for layer in found[0]["membership"]}


def _by_layer(found: list[Values]) -> str:
    return ", ".join(f"{100 * rate:.1f}" for rate in _layers(found).values()) if found else "-"


def _peak(found: list[Values]) -> str:
    return f"{100 * max(_layers(found).values()):.1f}" if found else "-"


def risk(values: Values) -> list[str]:
    rows = []
    for name in ("fashion-mnist", "digits"):
        found = values.get(f"risk {name}")
        if found:
            layers = ", ".join(row["layer"] for row in found)
            columns = [
                ", ".join(f"{scale * row[key]:.{digits}f}" for row in found)
                for key, scale, digits in (("training_error", 100, 1), ("held_out_error", 100, 1), ("strength", 1, 2))
            ]
            rows.append([name, layers, *columns])
    return _table(["shadow set", "layers", "error on its training set (paper), %", "held out, %", "strengths"], rows)


def bias(values: Values) -> list[str]:
    rows = []
    for style in bench.STYLES[1:]:
        series = [run["bias"] for run in runs(values, style) if run["bias"]]
        looks = [spread(look, 1, 2) for look in zip(*series, strict=True)] if series else ["-"] * bench.LOOKS
        rows.append([LABELS[style], *looks])
    places = [f"step {(i + 1) * bench.STEPS // bench.LOOKS}" for i in range(bench.LOOKS)]
    return _table(["method", *places], rows)


def steps(values: Values) -> list[str]:
    def cells(key: str, form: Callable[[float], str]) -> list[list[str]]:
        rows = []
        for network, (_, _, _, batch) in bench.NETWORKS.items():
            found = [values.get(f"step {network} {style}") for style in bench.STEPPED]
            if any(found):
                rows.append(
                    [f"{network}, batch {batch}", *("-" if cell is None else form(cell[key]) for cell in found)]
                )
        return rows

    header = ["SGD", "DP-SGD", "Auto-S", "DP-PSAC", "LM-DP-SGD, sound", "published"]
    times = _table(["ms a step", *header], cells("seconds", lambda value: f"{1000 * value:.0f}"))
    return [*times, "", *_table(["peak MB", *header], cells("megabytes", lambda value: f"{value:.0f}"))]


def allocations(values: Values) -> list[str]:
    names = list(dict.fromkeys(name for name, _ in bench.ALLOCATIONS))
    rows = []
    for name in names:
        row, seeds = ["standard Gaussian (flat)" if name == "standard" else name], 0
        for clip in ("eq", "med"):
            own = {"sensitivity-proportional": "uniform", "min-total-noise": "snr-consistent"}.get(name, name)
            own = own if clip == "eq" else name
            found = [
                values[key] for seed in bench.CENTRAL_SEEDS if (key := f"allocation run {own} {clip} {seed}") in values
            ]
            row += [f"{found[0]['lr']:g}" if found else "-", spread([run["accuracy"] for run in found])]
            seeds = max(seeds, len(found))
        rows.append([*row, str(seeds)])
    return _table(["strategy", "lr", "EqClip", "lr", "MedClip (noisy quantiles)", "seeds"], rows)
