"""Success of the default inversion attack on convolutional networks without noise, and of
membership attacks on clients and on examples.

The inversion attacks three clients with one or two images each, for each of three initial models.
The membership attacks are made on federations that overfit, which are trained on random halves of
the clients or of the examples, under several mechanisms at equal epsilon.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import nn

from fedlgm import data
from fedlgm.aggregation.contributions import raw_updates
from fedlgm.planning.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer, models
from fedlgm_lab.attacks import InversionSettings, Observation, invert
from fedlgm_lab.attacks.runs import membership
from fedlgm_lab.attacks.runs.target import Target
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import interval, table
from fedlgm_lab.studies.tables.runs import cells, measure_cells, settings
from fedlgm_lab.studies.tables.store import LEAST_SEEDS, Kept, Row

NAME = "attacks"
SEEDS = (1, 2, 3)
VICTIMS = 3
ITERATIONS = 400
_TRAINING = LocalTraining(lr=0.1, epochs=1, batch_size=8)
FEDERATIONS, EXAMPLES = 8, 300
EARLIER = "inversion, one start"
"""Name of the stored rows of an earlier default, with a single start, a first step of 0.1 and a
total-variation weight of 0.02.
"""
SIDES = ("online", "offline", "rmia online", "rmia offline")


def score_inversion(name: str, model: str, images: int, seed: int) -> Row:
    """Measure the SSIM that the default attack reaches on clients' updates of the seed's initial
    model.
    """
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


def score_membership(recipe: str, changes: Mapping[str, Any], seed: int) -> Row:
    """Measure the AUC of LiRA, RMIA and the attacks of `mia` on federations that are trained on
    random halves of the units.
    """
    overrides = {**changes, "run.seed": seed, "data.partition_seed": seed}
    unit = overrides.pop("unit")
    target = Target.open(recipe, overrides)
    people = membership.population(target, FEDERATIONS, examples=EXAMPLES, unit=unit)
    pooled, single, summary = membership.lira(people), membership.mia(people), people.results[0]
    inside, outside = membership.overfit(people.modules[0], people)
    return {
        "proven": summary["epsilon"] if "privacy.epsilon" in changes else None,
        "guarantee": str(summary["guarantee"]),
        "units": int(people.membership.shape[1]),
        "accuracy_members": inside,
        "accuracy_others": outside,
        "auc": {side: pooled[side].auc for side in SIDES},
        "tpr_at_1_percent": {
            side: min(pooled[side].rates, key=lambda rate: abs(rate.fpr - 0.01)).tpr
            for side in SIDES
        },
        "mia": {name: found.auc for name, found in single.items()},
    }


def memberships(store: Kept) -> str:
    """Make the table of membership attacks, by mechanism, budget and attacked unit."""
    lines = []
    for cell in cells(store, NAME):
        epsilon, unit = cell.name.get("budget"), cell.name["unit"]
        rows = store.find(**{"budget": None, **cell.name})
        if len(rows) < LEAST_SEEDS:
            continue
        protected = "client" if cell.recipe == "digits" else "example"
        proven = "NOT PRIVATE" if epsilon is None else f"{epsilon:g}, {protected}"
        if epsilon is not None and unit != protected:
            proven += " (other unit)"
        accuracy = [
            interval([100 * row[key] for row in rows], 1)
            for key in ("accuracy_members", "accuracy_others")
        ]
        found = [interval([row["auc"][side] for row in rows]) for side in SIDES]
        loss = interval([row["mia"]["modified-entropy"] for row in rows])
        lines.append([cell.name["mechanism"], proven, unit, *accuracy, *found, loss])
    header = ("method", "proven epsilon, unit", "attacked unit", "members %", "others %")
    attacks = ("LiRA online", "LiRA offline", "RMIA online", "RMIA offline")
    return table((*header, *attacks, "mia, modified entropy"), lines)


def inversions(store: Kept) -> str:
    """Make the table of the inversion attack with its default settings and an earlier default."""
    lines = []
    for name, model, images in settings(NAME)["targets"]:
        for attack, said in (("inversion", "default"), (EARLIER, "one start, shorter steps")):
            rows = store.find(attack=attack, data=name, model=model, images=images)
            if len(rows) < LEAST_SEEDS:
                continue
            scores = [np.array(row["ssim"]) for row in rows]
            every = np.concatenate(scores)
            means = interval([float(score.mean()) for score in scores])
            size = f"{model} ({rows[0]['parameters']:,})"
            lines.append([name, size, images, said, means, f"{every.min():.3f}", len(every)])
    header = ("data", "model (parameters)", "images", "attack", "SSIM", "least", "of")
    return table(header, lines)


def texts(store: Kept) -> Pages:
    """Make the page's tables."""
    return {"attacks.md": {"inversion": inversions(store), "membership": memberships(store)}}


def measure(store: Kept) -> None:
    """Make all attacks: first the inversions, seed by seed, then the membership attacks."""
    for seed in SEEDS:
        for name, model, images in settings(NAME)["targets"]:
            row = {"attack": "inversion", "data": name, "model": model, "images": images}
            store.keep({**row, "seed": seed}, partial(score_inversion, name, model, images, seed))
    measure_cells(cells(store, NAME, score_membership))


MAKER = Maker("attacks.json", texts, measure, partial=True)
