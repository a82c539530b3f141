"""How often each check of an audit fails: on releases as planned, and on releases that are not.

Every seed has separate canaries and noise. Defects change only the noise, so that the bound on
epsilon and the checks of the noise can be compared.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import scipy.stats
import torch
from torch import Tensor

from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_lab.audits import Audit, Subject, audit_record
from fedlgm_lab.audits.audit import reported_of
from fedlgm_lab.studies.tables.audits import SIZES, watch
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Kept, Row

SEEDS = (1, 2, 3)
AUDITS, TRIED, DISTINGUISHED = (
    150,
    20,
    5,
)  # of one seed: as planned, with a defect, by the distinguisher
CHECKS = ("bound", "noise scale", "noise independence", "noise repetition", "noise law")
ROUNDS, CANARIES = 9, 60
Noise = Callable[[np.random.Generator, list[np.ndarray], int], np.ndarray]
"""(generator, noise of the earlier rounds, coordinates) -> a round's noise, in units of the
plan's."""


def _draw_noise(rng: np.random.Generator, size: int) -> np.ndarray:
    return rng.standard_normal(size)


def _again(rng: np.random.Generator, past: list[np.ndarray], size: int) -> np.ndarray:
    return past[1] if len(past) == ROUNDS - 1 else _draw_noise(rng, size)


def _move_noise(rng: np.random.Generator, past: list[np.ndarray], size: int) -> np.ndarray:
    return np.roll(past[1], 17) if len(past) == ROUNDS - 1 else _draw_noise(rng, size)


def _permute_noise(rng: np.random.Generator, past: list[np.ndarray], size: int) -> np.ndarray:
    return rng.permutation(past[1]) if len(past) == ROUNDS - 1 else _draw_noise(rng, size)


def _reverse_noise(rng: np.random.Generator, past: list[np.ndarray], size: int) -> np.ndarray:
    signs = rng.choice([-1.0, 1.0], size)
    return signs * past[1][::-1] if len(past) == ROUNDS - 1 else _draw_noise(rng, size)


def _partly(
    share: float, rng: np.random.Generator, past: list[np.ndarray], size: int
) -> np.ndarray:
    """A share of each round's variance is that of the round before."""
    new = _draw_noise(rng, size)
    return new if not past else share**0.5 * past[-1] + (1 - share) ** 0.5 * new


def _draw_truncated(rng: np.random.Generator, size: int) -> np.ndarray:
    law = scipy.stats.truncnorm(-2.5, 2.5)
    return law.rvs(size, random_state=rng) / law.std()


def _by_seed(size: int, round_: int) -> np.ndarray:
    return np.random.default_rng(round_).standard_normal(size)


DEFECTS: dict[str, Noise] = {
    "half the noise": lambda rng, past, size: 0.5 * _draw_noise(rng, size),
    "noise of 0.9 of the scale": lambda rng, past, size: 0.9 * _draw_noise(rng, size),
    "noise of 0.99 of the scale": lambda rng, past, size: 0.99 * _draw_noise(rng, size),
    "noise of 0.97 of the scale": lambda rng, past, size: 0.97 * _draw_noise(rng, size),
    "0.6 of the scale in the smallest layer": lambda rng, past, size: np.concatenate(
        [0.6 * _draw_noise(rng, SIZES["a"]), _draw_noise(rng, size - SIZES["a"])]
    ),
    "round 9 has the noise of round 2": _again,
    "the same, moved by 17 places": _move_noise,
    "the same, permuted": _permute_noise,
    "the same, reversed, with random signs": _reverse_noise,
    "half of the variance from the round before": partial(_partly, 0.5),
    "a hundredth of the variance from the round before": partial(_partly, 0.01),
    "uniform, equal variance": lambda rng, past, size: rng.uniform(-(3**0.5), 3**0.5, size),
    "Laplace, equal variance": lambda rng, past, size: rng.laplace(scale=0.5**0.5, size=size),
    "cut off at 2.5, equal variance": lambda rng, past, size: _draw_truncated(rng, size),
    "Student t with 10 degrees, equal variance": lambda rng, past, size: (
        rng.standard_t(10, size) / (10 / 8) ** 0.5
    ),
    "a generator seeded with the round's number": lambda rng, past, size: _by_seed(size, len(past)),
    "noise rounded to float16": lambda rng, past, size: (
        _draw_noise(rng, size).astype(np.float16).astype(np.float64)
    ),
}


def failures(of: Subject, seed: int, audits: int, confidence: float, noise: Noise | None) -> Row:
    """Number of audits in which each check failed."""
    reported = reported_of(of, of.method.plan(of.start))
    counts = dict.fromkeys((*CHECKS, "any"), 0)
    for number in range(audits):
        publish = (
            None if noise is None else _publishing(noise, np.random.default_rng([seed, number]))
        )
        record = watch(of, CANARIES, 10**6 * seed + number, publish)
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
    """Number of audits by the distinguisher that failed, of laplace-iid or of a published
    variant.
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
    """Everything that is not kept."""
    layers = LayerTable.from_sizes(SIZES)
    of = {
        name: Subject.of(name, rounds=ROUNDS, layers=layers)
        for name in ("gaussian", "snr-consistent")
    }
    for seed in SEEDS:
        for name, subject in of.items():
            for confidence in (0.95, 0.999):
                row = {
                    "part": "as planned",
                    "mechanism": name,
                    "confidence": confidence,
                    "seed": seed,
                }
                store.keep(row, partial(failures, subject, seed, AUDITS, confidence, None))
        for defect, noise in DEFECTS.items():
            row = {"part": "defect", "defect": defect, "seed": seed}
            store.keep(row, partial(failures, of["snr-consistent"], seed, TRIED, 0.999, noise))
        for variant in ("sound", "published"):
            row = {"part": "distinguisher", "variant": variant, "seed": seed}
            store.keep(row, partial(count_failures_of_distinguisher, seed, DISTINGUISHED, variant))


def _count_failures(rows: list[Row], check: str) -> str:
    """Failed audits of all seeds, with the exact 95 % interval of their share in per cent."""
    failed, audits = (sum(row["failed"][check] for row in rows), sum(row["audits"] for row in rows))
    low, high = (
        100 * x for x in scipy.stats.binomtest(failed, audits).proportion_ci(method="exact")
    )
    return f"{failed} of {audits:,} ({low:.2g} to {high:.3g} %)"


def _cells(rows: list[Row]) -> list[str]:
    audits = sum(row["audits"] for row in rows)
    each = [str(sum(row["failed"][check] for row in rows)) for check in CHECKS]
    return [str(audits), *each, _count_failures(rows, "any")]


def texts(store: Kept) -> Pages:
    """Failed checks as planned, and with each defect."""
    planned = [
        [name, f"{confidence:g}", *_cells(rows)]
        for name in ("gaussian", "snr-consistent")
        for confidence in (0.95, 0.999)
        if (rows := store.find(part="as planned", mechanism=name, confidence=confidence))
    ]
    names = {"sound": "laplace-iid", "published": "uniform (published)"}
    planned += [
        [
            f"{names[variant]}, distinguisher",
            "0.999",
            str(sum(row["audits"] for row in rows)),
            *["-"] * len(CHECKS),
            _count_failures(rows, "any"),
        ]
        for variant in ("sound",)
        if (rows := store.find(part="distinguisher", variant=variant))
    ]
    found = [
        [defect, *_cells(rows)]
        for defect in DEFECTS
        if (rows := store.find(part="defect", defect=defect))
    ]
    if rows := store.find(part="distinguisher", variant="published"):
        audits = str(sum(row["audits"] for row in rows))
        found.append(
            [
                f"{names['published']}, distinguisher",
                audits,
                *["-"] * len(CHECKS),
                _count_failures(rows, "any"),
            ]
        )
    checks = ("audits", *CHECKS, "any (95 % interval)")
    return {
        "audits.md": {"as planned": table(("mechanism", "confidence", *checks), planned)},
        "data/audits.md": {"defects": table(("defect", *checks), found)},
    }


MAKER = Maker("audits.json", texts, measure)
