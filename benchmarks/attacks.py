"""Success of the default inversion of single updates on convolutional networks, without noise.

    python -m benchmarks.attacks            # measures what docs/results/attacks.json lacks
    python -m benchmarks.attacks --write    # and puts the table on docs/results/attacks.md

Three clients, with one or two images each, at each of three initial models.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from scipy import stats
from torch import nn

from benchmarks.kept import Kept, Row
from benchmarks.pages import show, table
from fedlgm import data, models
from fedlgm.attacks import InversionSettings, Observation, invert
from fedlgm.contributions import unbounded
from fedlgm.layers import LayerTable
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer

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


def inverted(name: str, model: str, images: int, seed: int) -> Row:
    """SSIM of the default attack on clients' updates at another initial model for each seed."""
    found, scores = data.load(name), []
    for victim in range(VICTIMS):
        rows = np.random.default_rng([seed, victim]).permutation(len(found.train_y))[:images]
        x, y = torch.from_numpy(np.asarray(found.train_x)[rows]), torch.from_numpy(found.train_y[rows])
        if name == "digits":
            x = nn.functional.interpolate(x, size=(28, 28), mode="bilinear", align_corners=False)
        shape = (int(x.shape[1]), int(x.shape[2]), int(x.shape[3]))
        module, own = (models.build(model, in_shape=shape, classes=10, seed=seed) for _ in range(2))
        layers = LayerTable.from_module(module)
        task = ClientTask(x, y, torch.Generator(), 1)
        trainer = SequentialTrainer(own, layers, _TRAINING)
        update = unbounded(next(iter(trainer.updates(layers.flatten(module), [task]))))[0].clone()
        seen = Observation.unprotected(layers, update)
        reached = invert(
            module, seen, _TRAINING, images=images, shape=shape, settings=InversionSettings(iterations=ITERATIONS)
        )
        scores += [score["ssim"] for score in reached.score(x)]
    return {"parameters": layers.size, "ssim": scores}


def interval(values: Sequence[float]) -> str:
    """Mean and the half width of the 95 % Student interval over the seeds."""
    mean = float(np.mean(values))
    if len(values) < 2:
        return f"{mean:.3f}"
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / len(values) ** 0.5)
    return f"{mean:.3f} ± {half:.3f}"


def texts(kept: Kept) -> dict[str, str]:
    """The page's table."""
    inversions = []
    for name, model, images in TARGETS:
        rows = kept.find(attack="inversion", data=name, model=model, images=images)
        scores = [np.array(row["ssim"]) for row in rows]
        if scores:
            every = np.concatenate(scores)
            means = interval([float(score.mean()) for score in scores])
            size = f"{rows[0]['parameters']:,}"
            inversions.append([name, f"{model} ({size})", str(images), means, f"{every.min():.3f}", str(len(every))])
    return {"inversion": table(("data", "model (parameters)", "images", "SSIM", "least", "of"), inversions)}


def main() -> None:
    """Measure, then print the table or put it on the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kept", type=Path, default=Path("docs/results/attacks.json"))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="processor time")
    parser.add_argument("--write", action="store_true", help="put the table on docs/results/attacks.md")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept = Kept(options.kept, options.minutes)
    for seed in SEEDS:
        for name, model, images in TARGETS:
            row = {"attack": "inversion", "data": name, "model": model, "images": images, "seed": seed}
            kept.keep(row, partial(inverted, name, model, images, seed))
    show(Path("docs/results/attacks.md"), texts(kept), options.write)


if __name__ == "__main__":
    main()
