"""Processor time that a client spends on LaDP-FL's selection, scores and noise, compared with Full
DP's bounding and noise (Table IV of the LaDP-FL paper).

Each repeat measures in turn the processor time of one optimizer step of the model (batch 50), of
Full DP's work on the finished update, and of LaDP-FL's work on the same update (as published, and
in the sound form under local trust). Medians are reported; a client's round is 20 optimizer steps
plus the work on the update. The paper compares durations of complete trainings, in which LaDP-FL
takes 10 to 17 % more than Full DP. This module also counts the layers that the published rule
selects at initialisation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fedlgm import mechanisms
from fedlgm.aggregation import BoundedSum
from fedlgm.aggregation.contributions import raw_updates
from fedlgm.mechanisms import Mechanism, UsesPrivateUpdates
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.noise.release import release
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan, RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.training import ClientTask, LocalTraining, SequentialTrainer, models
from fedlgm_lab.studies.tables.maker import Maker, Pages
from fedlgm_lab.studies.tables.pages import table
from fedlgm_lab.studies.tables.store import Values

BATCH = 50
MODEL, REPEATS, STEPS, THRESHOLD = "resnet18", 9, 20, 12.0
"""STEPS is the number of optimizer steps in a client's round in the paper. THRESHOLD is the R of
the recipe for ResNet-18.
"""
THRESHOLDS = (8.0, 12.0, 16.0, 20.0)
LABELS = {
    "full-dp": "Full DP: bound and noise",
    "ladp (published)": "LaDP-FL as published: select, score, noise",
    "ladp (sound)": "LaDP-FL sound: bound and noise what is selected",
    "ladp (sound), server's plan": "LaDP-FL sound: scores, at the server, once a round",
}
KEYS = KeyRing.from_seed(0)


def add_noise(update: Tensor, plan: ReleasePlan) -> Tensor:
    """Return a client's contribution, bounded and with noise."""
    own = BoundedSum.empty(plan)
    own.add(update)
    return release(own.total, plan, KEYS, 1, party=0)


def works(model: Tensor, update: Tensor, layers: LayerTable) -> dict[str, Callable[[], Any]]:
    """Return functions that do a client's work on its finished update, by mechanism."""
    # without memory of earlier scores, as in the paper
    scored = mechanisms.get("ladp", score="kl", threshold=THRESHOLD, memory=0.0)
    start = Transcript.start(model)
    history = start.extend(
        model + update, update, _plan(mechanisms.get("ladp", score="kl"), layers, start)
    )

    full = _plan(mechanisms.get("full-dp", calibration="matched"), layers, history)
    sound = _plan(scored, layers, history)
    published = mechanisms.get("ladp", variant="published", threshold=THRESHOLD, score_cap=1e-6)
    assert isinstance(published, UsesPrivateUpdates)
    frame = _plan(published, layers, history)

    def ladp_published() -> Tensor:
        own, _ = published.plan_from_private_update(frame, update, model)
        return add_noise(update, own)

    return {
        "full-dp": lambda: add_noise(update, full),
        "ladp (published)": ladp_published,
        "ladp (sound)": lambda: add_noise(update, sound),
        "ladp (sound), server's plan": lambda: _plan(scored, layers, history),
    }


def _plan(mechanism: Mechanism, layers: LayerTable, transcript: Transcript) -> ReleasePlan:
    training = LocalTraining(lr=0.1, epochs=2, batch_size=BATCH, gradient_clip=20.0)
    sampling = Sampling("poisson", 100, 0.1)
    facts = RunFacts(
        14.2765876859, sampling, "replace-one", "local", 400, 0.2, 0.02, training=training
    )
    return mechanism.plan(mechanism.table(layers), facts, transcript)


def time_work() -> dict[str, Any]:
    """Measure the median times in seconds over interleaved repeats, and the share by which each
    mechanism lengthens a client's round.
    """
    module = models.build(MODEL, in_shape=(3, 32, 32), classes=10)
    layers = LayerTable.from_module(module)
    model = layers.flatten(module)
    settings = LocalTraining(lr=0.1, epochs=1, batch_size=BATCH, gradient_clip=20.0)
    trainer = SequentialTrainer(module, layers, settings)
    draws = torch.Generator().manual_seed(0)
    x, y = (
        torch.randn(BATCH, 3, 32, 32, generator=draws),
        torch.randint(10, (BATCH,), generator=draws),
    )

    def step() -> Tensor:
        task = ClientTask(x, y, KEYS.torch_generator(Purpose.TRAIN, 1), 1)
        return raw_updates(next(iter(trainer.updates(model, [task]))))[0]

    todo: dict[str, Callable[[], Any]] = {
        "step": step,
        **works(model, step().clone(), layers),
    }
    times: dict[str, list[float]] = {label: [] for label in todo}
    for repeat in range(REPEATS + 1):
        for label, work in todo.items():
            started = time.process_time()
            work()
            if repeat:  # the first round warms up
                times[label].append(time.process_time() - started)
    medians = {label: statistics.median(values) for label, values in times.items()}
    base = STEPS * medians["step"] + medians["full-dp"]
    norms = layers.norms(model)
    sizes = torch.tensor([float(size) for size in layers.sizes])
    return {
        "model": MODEL,
        "parameters": layers.size,
        "layers": len(layers),
        "threads": torch.get_num_threads(),
        "repeats": REPEATS,
        "steps": STEPS,
        "seconds": medians,
        "full_dp_round": base,
        "extra": {
            m: (medians[m] - medians["full-dp"]) / base
            for m in ("ladp (published)", "ladp (sound)")
        },
        "selected": {
            f"{bound:g}": [
                int((norms >= bound).sum()),
                float(sizes[norms >= bound].sum() / sizes.sum()),
            ]
            for bound in THRESHOLDS
        },
    }


def texts(store: Values) -> Pages:
    """Make the tables of times and of the layers that the published rule selects."""
    found = store.values
    base, seconds = found["full_dp_round"], found["seconds"]
    times = [[f"{found['steps']} optimizer steps", f"{found['steps'] * seconds['step']:.2f} s"]]
    times += [[label, f"{1000 * seconds[name]:.0f} ms"] for name, label in LABELS.items()]
    shares = [found["steps"] * seconds["step"], *(seconds[name] for name in LABELS)]
    rows = [[*row, f"{share / base:.2%}"] for row, share in zip(times, shares, strict=True)]
    selected = [
        [bound, str(count), f"{share:.1%}"] for bound, (count, share) in found["selected"].items()
    ]
    shown = {
        "overhead": table(["work", "time", "of the client's round under Full DP"], rows),
        "selected": table(
            ["R", f"layers noised (of {found['layers']})", "parameters noised"], selected
        ),
    }
    return {"data/ladp.md": shown}


def measure(store: Values) -> None:
    """Measure all figures at once, because they must come from one machine."""
    if not store.values:
        store.check_time()
        for name, figure in time_work().items():
            store.get(name, lambda figure=figure: figure)


MAKER = Maker("ladp-overhead.json", texts, measure, Values)
