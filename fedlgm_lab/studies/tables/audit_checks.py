"""Rates at which each check of an audit fails, on releases as planned and with a defect.

Every seed has separate canaries and noise. Defects change only the noise, so that the bound on
epsilon and the checks of the noise can be compared.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import release
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.audits import Audit, Subject, audit_record
from fedlgm_lab.audits.audit import reported_of, watch
from fedlgm_lab.studies.tables.audits import SIZES
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Kept, Row

SEEDS = (1, 2, 3)
# number of audits per seed: of releases as planned, of releases with a defect, and by the
# distinguisher
AUDITS, TRIED, DISTINGUISHED = 150, 20, 5
CHECKS = ("bound", "noise scale", "noise independence", "noise repetition", "noise law")
ROUNDS, CANARIES = 9, 60
PLANNED, CONFIDENCES = ("gaussian", "snr-consistent"), (0.95, 0.999)
Noise = Callable[[np.random.Generator, list[np.ndarray], int], np.ndarray]
"""(generator, noise of the earlier rounds, number of coordinates) -> noise of a round, in units of
the planned standard deviation.
"""


def _draw_noise(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.standard_normal(size)


def _scaled(scale: float) -> Noise:
    return lambda rng, past, size: scale * _draw_noise(rng, size)


def _repeated(change: Callable[[np.random.Generator, np.ndarray], np.ndarray]) -> Noise:
    """Return noise whose last round repeats the noise of the second round, changed by `change`."""
    return lambda rng, past, size: (
        change(rng, past[1]) if len(past) == ROUNDS - 1 else _draw_noise(rng, size)
    )


def _partly(share: float) -> Noise:
    """Return noise that takes this share of its variance in a round from the previous round."""

    def noise(rng: np.random.Generator, past: list[np.ndarray], size: int) -> np.ndarray:
        new = _draw_noise(rng, size)
        return share**0.5 * past[-1] + (1 - share) ** 0.5 * new if past else new

    return noise


def _draw_truncated(rng: np.random.Generator, size: int) -> np.ndarray:
    law = scipy.stats.truncnorm(-2.5, 2.5)
    return law.rvs(size, random_state=rng) / law.std()


DEFECTS: dict[str, Noise] = {
    "half the noise": _scaled(0.5),
    "noise of 0.9 of the scale": _scaled(0.9),
    "noise of 0.99 of the scale": _scaled(0.99),
    "noise of 0.97 of the scale": _scaled(0.97),
    "0.6 of the scale in the smallest layer": lambda rng, past, size: (
        _draw_noise(rng, size) * np.where(np.arange(size) < SIZES["a"], 0.6, 1.0)
    ),
    "round 9 has the noise of round 2": _repeated(lambda rng, noise: noise),
    "the same, moved by 17 places": _repeated(lambda rng, noise: np.roll(noise, 17)),
    "the same, permuted": _repeated(lambda rng, noise: rng.permutation(noise)),
    "the same, reversed, with random signs": _repeated(
        lambda rng, noise: rng.choice([-1.0, 1.0], len(noise)) * noise[::-1]
    ),
    "half of the variance from the round before": _partly(0.5),
    "a hundredth of the variance from the round before": _partly(0.01),
    "uniform, equal variance": lambda rng, past, size: rng.uniform(-(3**0.5), 3**0.5, size),
    "Laplace, equal variance": lambda rng, past, size: rng.laplace(scale=0.5**0.5, size=size),
    "cut off at 2.5, equal variance": lambda rng, past, size: _draw_truncated(rng, size),
    "Student t with 10 degrees, equal variance": lambda rng, past, size: (
        rng.standard_t(10, size) / (10 / 8) ** 0.5
    ),
    "a generator seeded with the round's number": lambda rng, past, size: _draw_noise(
        np.random.default_rng(len(past)), size
    ),
    "noise rounded to float16": lambda rng, past, size: (
        _draw_noise(rng, size).astype(np.float16).astype(np.float64)
    ),
}


def failures(of: Subject, seed: int, audits: int, confidence: float, noise: Noise | None) -> Row:
    """Count the audits in which each check fails."""
    reported = reported_of(of, of.method.plan(of.start))
    counts = dict.fromkeys((*CHECKS, "any"), 0)
    for number in range(audits):
        rng = np.random.default_rng([seed, number])
        publish = release if noise is None else _publishing(noise, rng)
        record = watch(of, CANARIES, "release", 10**6 * seed + number, publish=publish)
        result = audit_record(record, of.layers, reported, confidence=confidence)
        failed = {check.name for check in result.checks if not check.passed} | (
            {"bound"} if result.exceeded else set()
        )
        for name in failed & set(CHECKS):
            counts[name] += 1
        counts["any"] += not result.passed
    return {"audits": audits, "failed": counts}


def _publishing(noise: Noise, rng: np.random.Generator) -> Callable[..., Tensor]:
    past: list[np.ndarray] = []

    def publish(total: Tensor, plan: ReleasePlan, keys: KeyRing, round_: int, **_: Any) -> Tensor:
        scale = np.concatenate([np.full(size, sigma) for _, size, _, sigma in plan.parts])
        past.append(noise(rng, past, len(scale)))
        return total + torch.from_numpy(scale * past[-1])

    return publish


def count_failures_of_distinguisher(seed: int, audits: int, variant: str) -> Row:
    """Count the audits by the distinguisher that fail.

    Args:
        seed: the seeds of the audits are 100 * seed, 100 * seed + 1, ...
        audits: number of audits.
        variant: "sound" to audit "laplace-iid", or "published" to audit the published variant of
            "uniform".
    """
    name = "laplace-iid" if variant == "sound" else "uniform"
    of = Subject.of(name, variant, epsilon=4.0)
    made = (
        Audit(method="distinguisher", seed=100 * seed + number, trials=1000)
        for number in range(audits)
    )
    return {
        "audits": audits,
        "failed": {"any": sum(not audit.mechanism(of).passed for audit in made)},
    }


def measure(store: Kept) -> None:
    """Measure every figure that is not stored yet."""
    layers = LayerTable.from_sizes(SIZES)
    of = {name: Subject.of(name, rounds=ROUNDS, layers=layers) for name in PLANNED}
    for seed in SEEDS:
        for name, confidence in itertools.product(PLANNED, CONFIDENCES):
            row = {"part": "as planned", "mechanism": name, "confidence": confidence, "seed": seed}
            store.keep(row, partial(failures, of[name], seed, AUDITS, confidence, None))
        for defect, noise in DEFECTS.items():
            row = {"part": "defect", "defect": defect, "seed": seed}
            store.keep(row, partial(failures, of["snr-consistent"], seed, TRIED, 0.999, noise))
        for variant in ("sound", "published"):
            row = {"part": "distinguisher", "variant": variant, "seed": seed}
            store.keep(row, partial(count_failures_of_distinguisher, seed, DISTINGUISHED, variant))


def _count_failures(rows: list[Row], check: str) -> str:
    """Format the number of failed audits, and the 95 % interval of their share in per cent."""
    failed, audits = (sum(row["failed"][check] for row in rows), sum(row["audits"] for row in rows))
    low, high = (
        100 * x for x in scipy.stats.binomtest(failed, audits).proportion_ci(method="exact")
    )
    return f"{failed} of {audits:,} ({low:.2g} to {high:.3g} %)"


def _row(rows: list[Row], checks: tuple[str, ...] = CHECKS) -> list[str]:
    """Format the number of audits, the failures of each check ("-" for checks that were not made),
    and the failures of any check.
    """
    counts = [
        str(sum(row["failed"][check] for row in rows)) if check in checks else "-"
        for check in CHECKS
    ]
    return [str(sum(row["audits"] for row in rows)), *counts, _count_failures(rows, "any")]


def texts(store: Kept) -> Pages:
    """Make the tables of failed checks, for releases as planned and for each defect."""
    planned = [
        [name, f"{confidence:g}", *_row(rows)]
        for name, confidence in itertools.product(PLANNED, CONFIDENCES)
        if (rows := store.find(part="as planned", mechanism=name, confidence=confidence))
    ]
    found = [
        [defect, *_row(rows)]
        for defect in DEFECTS
        if (rows := store.find(part="defect", defect=defect))
    ]
    for variant, label, lines in (
        ("sound", ["laplace-iid, distinguisher", "0.999"], planned),
        ("published", ["uniform (published), distinguisher"], found),
    ):
        if rows := store.find(part="distinguisher", variant=variant):
            lines.append([*label, *_row(rows, ())])
    checks = ("audits", *CHECKS, "any (95 % interval)")
    return {
        "audits.md": {"as planned": table(("mechanism", "confidence", *checks), planned)},
        "data/audits.md": {"defects": table(("defect", *checks), found)},
    }


MAKER = Maker("audits.json", texts, measure)
