"""Can accuracy be forecast from public examples? Figures of the last section of docs/results/recommend.md.

    python -m benchmarks.rehearsal            # makes the missing rehearsals of the settings on digits
    python -m benchmarks.rehearsal --write    # the table of the page

`fedlgm_lab.recommend.forecast` describes rehearsals. No forecast uses a measured accuracy; only the server learning rate
is that of the measured runs.
"""

from __future__ import annotations

import argparse
import math
import statistics
from functools import partial
from typing import Any

from benchmarks.kept import Kept
from benchmarks.pages import show, table
from benchmarks.recommend import DATA_PAGE, FLAT, KEPT, PAGE, RULES, SETTINGS, Setting, measured
from fedlgm import mechanisms
from fedlgm_lab.recommend.forecast import SEED, Rehearsals
from fedlgm_lab.recommend.setting import setting_of

REHEARSED = PAGE.with_name("rehearsal.json")


def rehearse(setting: Setting, rule: str, rate: float, seed: int) -> dict[str, Any]:
    """Accuracy (%) of a rehearsal on held-out public examples."""
    public, scored, examples = setting.scored
    changes = [*scored, *setting.of(rule), f"{setting.rate}={rate}", "training.vectorize=on", f"run.seed={seed}"]
    found, _ = setting_of(setting.recipe, None, None, public, None, changes, examples)
    mechanism = mechanisms.get(rule, bound=float(getattr(found.assembly.mechanism, "bound", 1.0)))
    return {"forecast": round(100 * Rehearsals(found, seed).accuracy(mechanism, found.facts), 3)}


def rates(name: str, setting: Setting) -> dict[str, float]:
    """The rate of each rule's measured runs."""
    if setting.kept is None:
        rows = Kept(KEPT).find(setting=name)
        return {row["rule"]: row["rate"] for row in rows if row["seed"] != setting.search.seed}
    from benchmarks import adaptive

    task = "small" if "64-32-10" in name else "deep"
    names = {"flat Gaussian": FLAT, "uniform": "uniform", "SNR-consistent": "snr-consistent"}
    rows = Kept(adaptive.PAGE.with_suffix(".json")).find(task=task)
    chosen: dict[str, float] = {}
    for label, rule in names.items():
        own = {row["rate"]: row["accuracy"] for row in rows if row["method"] == label and row["seed"] == 100}
        chosen[rule] = max(own, key=lambda rate: own[rate])
    return chosen


def settings() -> dict[str, Setting]:
    """Settings in which whole clients of the digits are protected."""
    return {name: one for name, one in SETTINGS.items() if one.recipe == "digits"}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    if parser.parse_args().write:
        texts = page()
        show(DATA_PAGE, {"forecasts": texts.pop("forecasts")}, write=True)
        show(PAGE, texts, write=True)
        return
    kept = Kept(REHEARSED)
    for rule in (FLAT, *RULES):
        for name, setting in settings().items():
            if (rate := rates(name, setting).get(rule)) is not None:
                label = {"setting": name, "rule": rule, "rate": rate, "seed": SEED}
                kept.keep(label, partial(rehearse, setting, rule, rate, SEED))


def largest() -> tuple[float, int]:
    """Largest error of the kept forecasts in points, which is `forecast.ERROR`, and the number of settings."""
    kept, runs = Kept(REHEARSED), Kept(KEPT)
    found: dict[str, float] = {}
    for name, setting in settings().items():
        figures = measured(name, setting, runs)
        for row in kept.find(setting=name):
            values = figures.get(row["rule"])
            if values:
                error = abs(row["forecast"] - statistics.fmean(values.values()))
                found[name] = max(found.get(name, 0.0), error)
    return max(found.values()), len(found)


def page() -> dict[str, str]:
    """The table of forecasts, and what they amount to."""
    kept, runs = Kept(REHEARSED), Kept(KEPT)
    rows, errors, gaps = [], [], []
    for name, setting in settings().items():
        found = measured(name, setting, runs)
        flat: tuple[float, float] | None = None
        for rule in (FLAT, *RULES):
            told = [row["forecast"] for row in kept.find(setting=name, rule=rule)]
            if not told or not found.get(rule):
                continue
            values = list(found[rule].values())
            forecast, accuracy, spread = told[0], statistics.fmean(values), f"{min(values):.1f} to {max(values):.1f}"
            rows.append([name, rule, f"{forecast:.1f}", f"{accuracy:.1f}", spread, f"{forecast - accuracy:+.1f}"])
            errors.append(forecast - accuracy)
            if flat is None:
                flat = (forecast, accuracy)
            else:
                gaps.append((forecast - flat[0], accuracy - flat[1]))
    header = ["setting", "rule", "forecast", "measured", "seeds from", "error"]
    root = math.sqrt(statistics.fmean(error**2 for error in errors))
    agree = sum(told * seen > 0 for told, seen in gaps)
    summary = (
        f"{len(errors)} forecasts: mean error {statistics.fmean(errors):+.1f} points, root mean square {root:.1f}, "
        f"largest {max(errors, key=abs):+.1f}. The sign of the difference from the flat Gaussian is right in {agree} "
        f"of {len(gaps)} cases."
    )
    return {"forecasts": table(header, rows), "forecast errors": summary}


if __name__ == "__main__":
    main()
