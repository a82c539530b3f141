"""The constants that the LaDP-FL paper leaves open, on its mechanism as published: B (score cap)
and R (threshold).

Recipe `ladp-fashion-mnist-published`, five rounds, seeds 1 to 3: another initial model, cohorts and
noise in each. Full DP has the same frame (calibration = "matched"). Nothing else is changed.
"""

from __future__ import annotations

import tempfile
import time
from functools import partial
from pathlib import Path

import numpy as np

import simulations
from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.pages import interval, table
from fedlgm_lab.studies.tables.store import Kept, Row

SEEDS = (1, 2, 3)
ROUNDS = 5
RECIPE = "ladp-fashion-mnist-published"
CONSTANTS = ((1e-6, 3.0), (1e-9, 3.0), (1e-12, 3.0), (1e-12, 0.0))
"""(B, R): the recipe's, smaller B, and the least one with every layer noised."""
FULL_DP = ("mechanism.name=full-dp", "mechanism.variant=sound", "mechanism.calibration=matched")


def run(overrides: tuple[str, ...], seed: int) -> Row:
    """One run: accuracy after the last round, noise, scores and noised share."""
    started = time.process_time()
    frame = (
        f"federation.rounds={ROUNDS}",
        f"privacy.max_participations={ROUNDS}",
        f"run.evaluate_every={ROUNDS}",
        "run.checkpoint_every=1000",
        f"run.seed={seed}",
        "run.trackers=[]",
    )
    with tempfile.TemporaryDirectory() as folder:
        result = simulations.simulate(
            RECIPE, overrides=[*frame, *overrides], run_dir=Path(folder) / "run"
        )
        rows, sizes = result.history[1:], np.array([row["size"] for row in result.layers()])
    found: Row = {
        "accuracy": 100 * float(result["accuracy"]),
        "noise_scale": float(sum(row["noise_scale"] for row in rows)),
        "claimed": result.claimed_epsilon,
        "proven": str(result.epsilon),
    }
    if "clients" in rows[0]:
        first = rows[0]["clients"]
        noised = np.array(first["selected"]) > 0
        scores = np.array(first["score"])[noised]
        found["noised_share"] = float((noised * sizes).sum(axis=1).mean() / sizes.sum())
        quantiles = np.quantile(scores, [0, 0.5, 1]).tolist() if scores.size else []
        found["first_scores"] = [float(f"{value:.4g}") for value in quantiles]
    return found | {"seconds": round(time.process_time() - started, 1)}


def cells() -> list[tuple[str, float | None, float | None, tuple[str, ...]]]:
    """(method, B, R, overrides)."""
    made: list[tuple[str, float | None, float | None, tuple[str, ...]]] = [
        ("Full DP (matched)", None, None, FULL_DP)
    ]
    for cap, threshold in CONSTANTS:
        changed = (f"mechanism.score_cap={cap!r}", f"mechanism.threshold={threshold}")
        made.append(("LaDP-FL (published)", cap, threshold, changed))
    return made


def text(store: Kept) -> str:
    """The table: noise beside Full DP's."""
    full = store.find(method="Full DP (matched)")
    reference = float(np.mean([row["noise_scale"] for row in full])) if full else float("nan")
    lines = []
    for method, cap, threshold, _ in cells():
        rows = store.find(method=method, cap=cap, threshold=threshold)
        if not rows:
            continue
        ratio = float(np.mean([row["noise_scale"] for row in rows])) / reference
        share = (
            "100 %"
            if cap is None
            else f"{100 * float(np.mean([row['noised_share'] for row in rows])):.0f} %"
        )
        lines.append(
            [
                method,
                "-" if cap is None else f"{cap:g}",
                "-" if threshold is None else f"{threshold:g}",
                share,
                interval([row["accuracy"] for row in rows]),
                f"{ratio:.3g}",
                str(len(rows)),
            ]
        )
    head = ("method", "B", "R", "noised, first round", "accuracy (%)", "noise / Full DP's", "seeds")
    return table(head, lines)


def measure(store: Kept) -> None:
    """All cells, seed by seed."""
    for seed in SEEDS:
        for method, cap, threshold, overrides in cells():
            row = {"method": method, "cap": cap, "threshold": threshold, "seed": seed}
            store.keep(row, partial(run, overrides, seed))


MAKER = Maker("ladp-constants.json", lambda store: {"ladp.md": {"constants": text(store)}}, measure)
