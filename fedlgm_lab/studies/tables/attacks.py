"""Success of the default inversion on convolutional networks without noise, and of membership
attacks by unit.

Inversion: three clients, with one or two images each, at each of three initial models. Membership:
federations that overfit, on random halves of the clients or of the examples, under several
mechanisms at equal epsilon.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import numpy as np
import torch
from torch import nn

from fedlgm import data
from fedlgm.aggregation.contributions import raw_updates
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer, models
from fedlgm_lab.attacks import InversionSettings, Observation, invert
from fedlgm_lab.attacks.membership import Rate
from fedlgm_lab.attacks.runs import membership
from fedlgm_lab.attacks.runs.target import Target
from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.pages import interval, table
from fedlgm_lab.studies.tables.store import LEAST_SEEDS, Kept, Row

SEEDS = (1, 2, 3)
VICTIMS = 3
ITERATIONS = 400
TARGETS: tuple[tuple[str, str, int], ...] = (  # data, model, images of a client
    ("digits", "cnn", 1),
    ("fashion-mnist", "cnn", 1),
    ("fashion-mnist", "cnn", 2),
    ("fashion-mnist", "cnn-small", 1),
)
_TRAINING = LocalTraining(lr=0.1, epochs=1, batch_size=8)
FEDERATIONS, EXAMPLES = 8, 300
FEDERATION = (
    "federation.clients=30",
    "federation.rounds=40",
    "federation.rate=0.3",
    "data.partition=iid",
    "model.hidden=[64]",
    "training.lr=0.3",
)
PARTY = (
    "federation.rounds=200", "model.hidden=[64]", "training.batch_size=50",
)  # fmt: skip
MECHANISMS: tuple[tuple[str, str, float | None], ...] = (  # recipe, mechanism, epsilon
    ("digits", "none", None),
    *(
        ("digits", name, epsilon)
        for name in ("snr-consistent", "gaussian", "ladp", "full-dp")
        for epsilon in (8.0, 1.0)
    ),
    *(("dp-sgd-digits", "dp-sgd", epsilon) for epsilon in (8.0, 1.0)),
)
UNITS: dict[str, tuple[Literal["client", "example"], ...]] = {
    "digits": ("client", "example"),
    "dp-sgd-digits": ("example",),
}
EARLIER = "inversion, one start"
"""Kept rows of the default before there were several starts: a first step of 0.1, a total-variation
weight of 0.02."""
SIDES = ("online", "offline", "rmia online", "rmia offline")


def score_inversion(name: str, model: str, images: int, seed: int) -> Row:
    """SSIM of the default attack on clients' updates at another initial model for each seed."""
    found, scores = data.load(name), []
    for victim in range(VICTIMS):
        rows = np.random.default_rng([seed, victim]).permutation(len(found.train_y))[:images]
        x, y = (
            torch.from_numpy(np.asarray(found.train_x)[rows]),
            torch.from_numpy(found.train_y[rows]),
        )
        if name == "digits":
            x = nn.functional.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
        shape = (int(x.shape[1]), int(x.shape[2]), int(x.shape[3]))
        module, own = (models.build(model, in_shape=shape, classes=10, seed=seed) for _ in range(2))
        layers = LayerTable.from_module(module)
        task = ClientTask(x, y, torch.Generator(), 1)
        trainer = SequentialTrainer(own, layers, _TRAINING)
        update = raw_updates(next(iter(trainer.updates(layers.flatten(module), [task]))))[0].clone()
        seen = Observation.unprotected(layers, update)
        reached = invert(
            module,
            seen,
            _TRAINING,
            images=images,
            shape=shape,
            settings=InversionSettings(iterations=ITERATIONS),
        )
        scores += [score["ssim"] for score in reached.score(x)]
    return {"parameters": layers.size, "ssim": scores}


def score_membership(
    recipe: str, name: str, epsilon: float | None, unit: Literal["client", "example"], seed: int
) -> Row:
    """AUC of LiRA, RMIA and the attacks of `mia` on federations that were trained on halves of the
    units.
    """
    overrides = [
        *(FEDERATION if recipe == "digits" else PARTY),
        f"mechanism.name={name}",
        f"run.seed={seed}",
    ]
    overrides += [
        f"data.partition_seed={seed}",
        *([] if epsilon is None else [f"privacy.epsilon={epsilon}"]),
    ]
    people = membership.population(
        Target.open(recipe, overrides), FEDERATIONS, examples=EXAMPLES, unit=unit
    )
    pooled, single, summary = membership.lira(people), membership.mia(people), people.results[0]
    inside, outside = membership.overfit(people.modules[0], people)
    return {
        "proven": summary["epsilon"] if epsilon is not None else None,
        "guarantee": str(summary["guarantee"]),
        "units": int(people.membership.shape[1]),
        "accuracy_members": inside,
        "accuracy_others": outside,
        "auc": {side: pooled[side].auc for side in SIDES},
        "tpr_at_1_percent": {
            side: min(pooled[side].rates, key=_to_one_percent).tpr for side in SIDES
        },
        "mia": {name: found.auc for name, found in single.items()},
    }


def _to_one_percent(rate: Rate) -> float:
    return abs(rate.fpr - 0.01)


def memberships(store: Kept) -> str:
    """One row per mechanism, budget and unit of the attack."""
    lines = []
    for recipe, name, epsilon in MECHANISMS:
        for unit in UNITS[recipe]:
            rows = store.find(
                attack="membership", recipe=recipe, mechanism=name, budget=epsilon, unit=unit
            )
            if len(rows) < LEAST_SEEDS:
                continue
            protected = "client" if recipe == "digits" else "example"
            proven = "NOT PRIVATE" if epsilon is None else f"{epsilon:g}, {protected}"
            if epsilon is not None and unit != protected:
                proven += " (other unit)"
            accuracy = [
                interval([100 * row[key] for row in rows], 1)
                for key in ("accuracy_members", "accuracy_others")
            ]
            found = [interval([row["auc"][side] for row in rows]) for side in SIDES]
            loss = interval([row["mia"]["modified-entropy"] for row in rows])
            lines.append([name, proven, unit, *accuracy, *found, loss])
    header = (
        "method",
        "proven epsilon, unit",
        "attacked unit",
        "members %",
        "others %",
        "LiRA online",
        "LiRA offline",
    )
    return table((*header, "RMIA online", "RMIA offline", "mia, modified entropy"), lines)


def texts(store: Kept) -> dict[str, str]:
    """The page's tables."""
    inversions = []
    for name, model, images in TARGETS:
        for attack, said in (("inversion", "default"), (EARLIER, "one start, shorter steps")):
            rows = store.find(attack=attack, data=name, model=model, images=images)
            if len(rows) < LEAST_SEEDS:
                continue
            scores = [np.array(row["ssim"]) for row in rows]
            every = np.concatenate(scores)
            means = interval([float(score.mean()) for score in scores])
            size = f"{model} ({rows[0]['parameters']:,})"
            inversions.append(
                [name, size, str(images), said, means, f"{every.min():.3f}", str(len(every))]
            )
    header = ("data", "model (parameters)", "images", "attack", "SSIM", "least", "of")
    return {"inversion": table(header, inversions), "membership": memberships(store)}


def measure(store: Kept) -> None:
    """All attacks, seed by seed."""
    for seed in SEEDS:
        for name, model, images in TARGETS:
            row = {"attack": "inversion", "data": name, "model": model, "images": images}
            store.keep({**row, "seed": seed}, partial(score_inversion, name, model, images, seed))
    for seed in SEEDS:
        for recipe, name, epsilon in MECHANISMS:
            for unit in UNITS[recipe]:
                row = {"attack": "membership", "recipe": recipe, "mechanism": name}
                row |= {"budget": epsilon, "unit": unit}
                store.keep(
                    {**row, "seed": seed},
                    partial(score_membership, recipe, name, epsilon, unit, seed),
                )


MAKER = Maker("attacks.json", lambda store: {"attacks.md": texts(store)}, measure, partial=True)
