"""The federated FashionMNIST setting of the SNR-consistent paper: what its accuracy depends on, and
cells of Table 3. Every run is the recipe `fashion-mnist` with the stated keys changed.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

from torch import nn

from fedlgm.training.models.convolutional import cnn
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.store import CHANGE, Kept, change


def glorot_cnn(in_shape: tuple[int, int, int], classes: int) -> nn.Module:
    """The paper's network with Glorot's uniform weights and biases of zero, as Keras initialises
    it.
    """
    module = cnn(in_shape, classes, activation="sigmoid")
    for child in module.modules():
        if isinstance(child, nn.Conv2d | nn.Linear):
            nn.init.xavier_uniform_(child.weight)
            nn.init.zeros_(child.bias)  # type: ignore[arg-type]
    return module


SIGNED, UNIT = "data.pixels=[-1, 1]", "data.pixels=[0, 1]"
GLOROT = "model.name=fedlgm_lab.studies.tables.fashion_mnist:glorot_cnn"


@dataclass(frozen=True)
class Study:
    """Variants of the recipe that are compared, seed by seed.

    Attributes:
        rounds: rounds planned, for which noise is calibrated.
        variants: name -> overrides; the others are compared with the first one.
        seeds: seeds of every variant, in this order.
    """

    rounds: int
    variants: dict[str, tuple[str, ...]]
    seeds: tuple[int, ...]


def _table_3() -> dict[str, tuple[str, ...]]:
    """Sound cells of the paper's table; under EqClip two pairs of its five rules are one each."""
    rules = (
        "snr-consistent",
        "uniform",
        "dimension-adjusted",
        "min-total-noise",
        "sensitivity-proportional",
    )
    stale = ("mechanism.clip=med", "mechanism.norms=stale")
    cells = {f"{rule}, EqClip": (f"mechanism.name={rule}",) for rule in rules[:3]}
    cells["flat Gaussian"] = ("mechanism.name=gaussian",)
    return cells | {
        f"{rule}, MedClip (stale)": (f"mechanism.name={rule}", *stale) for rule in rules
    }


STUDIES = {
    "causes": Study(
        100,
        {
            "pixels in [-1, 1]": (SIGNED,),
            "pixels in [0, 1]": (UNIT,),
            "pixels of mean 0 and variance 1": ("data.pixels=[-0.8102, 2.0227]",),
            "Glorot weights": (SIGNED, GLOROT),
            "pixels in [0, 1], Glorot weights": (UNIT, GLOROT),
            "clients of equal size, 0.5 a class": (SIGNED, "data.partition=hsu", "data.alpha=5.0"),
            "clients of equal size, 0.5 in all": (SIGNED, "data.partition=hsu", "data.alpha=0.5"),
            "batches of 16": (SIGNED, "training.batch_size=16"),
            "batches of 64": (SIGNED, "training.batch_size=64"),
        },
        (1, 2, 3),
    ),
    "whole": Study(
        300,
        {
            "SNR-consistent, pixels in [-1, 1]": (SIGNED,),
            "SNR-consistent, pixels in [0, 1]": (UNIT,),
            "SNR-consistent, pixels in [0, 1], Glorot weights": (UNIT, GLOROT),
            "SNR-consistent, pixels in [0, 1], batches of 16": (UNIT, "training.batch_size=16"),
            "SNR-consistent, pixels in [0, 1], batches of 8": (UNIT, "training.batch_size=8"),
            "uniform, pixels in [-1, 1]": (SIGNED, "mechanism.name=uniform"),
            "uniform, pixels in [0, 1]": (UNIT, "mechanism.name=uniform"),
        },
        (1, 2, 3),
    ),
    "table-3": Study(300, _table_3(), (1, 2, 3)),
}


def measure(store: Kept) -> None:
    """Make missing runs: all variants with the first seed, then with the next."""
    for name, study in STUDIES.items():
        for seed, (variant, changes) in itertools.product(study.seeds, study.variants.items()):
            overrides = [*changes, f"federation.rounds={study.rounds}"]
            label = {"study": name, "variant": variant, "seed": seed}
            store.measure(label, "fashion-mnist", overrides)


def texts(store: Kept) -> Pages:
    """A table for each study with finished runs."""
    made: dict[str, dict[str, str]] = {"fashion-mnist.md": {}, "data/fashion-mnist.md": {}}
    for name, study in STUDIES.items():
        by: dict[str, dict[str, dict[int, float]]] = {
            variant: {
                figure: {
                    row["seed"]: row[figure] for row in store.find(study=name, variant=variant)
                }
                for figure in ("final", "late", "highest")
            }
            for variant in study.variants
        }
        rows: list[list[Any]] = []
        reference = next(iter(by.values()))["late"]
        for variant, found in by.items():
            if not found["late"]:
                continue
            seeds = ", ".join(map(str, sorted(found["late"])))
            cells = [
                spread(list(found[figure].values())) for figure in ("final", "late", "highest")
            ]
            compared = (
                ["", "", ""] if found["late"] is reference else change(found["late"], reference)
            )
            rows.append([variant, *cells, seeds, *compared])
        if rows:
            header = [
                "variant",
                "last round",
                "mean of the last five evaluated",
                "highest",
                "seeds",
                *CHANGE,
            ]
            page = "fashion-mnist.md" if name == "table-3" else "data/fashion-mnist.md"
            made[page][name] = table(header, rows)
    return made


MAKER = Maker("fashion-mnist.json", texts, measure, partial=True)
