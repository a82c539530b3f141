"""Plans, models and work that a node refuses, whoever sends them."""

from __future__ import annotations

import json
from typing import Any

import numpy as np

from fedlgm_nodes.protocol import frames
from tests.support import nodes
from tests.support.nodes import BODY, MODEL, plan


def changed(**values: Any) -> str:
    """The usual plan with other values."""
    return json.dumps(json.loads(plan().to_json()) | values)


GUARANTEE = json.loads(plan().to_json())["guarantee"]
K = len(nodes.LAYERS)
SIGMA, CLIP = plan().sigma.tolist(), plan().clip.tolist()
PLANS = {
    "noise over ten": changed(
        sigma=[s / 10 for s in SIGMA]
    ),  # would cost a hundred releases: more than the budget
    "no noise": changed(sigma=[0.0] * K),
    "hardly any Laplace noise": changed(
        family="laplace", sigma=[1e-4] * K
    ),  # its composition would take gigabytes
    "negative noise": changed(sigma=[-s for s in SIGMA]),
    "infinite noise, released": changed(sigma=[None] * K, released=[True] * K),
    "noise that is not a number": changed(sigma=[float("nan")] * K),
    "absurd noise": changed(sigma=[1e300] * K),
    "noise as text": changed(sigma=["none"] * K),
    "bounds times a hundred": changed(clip=[c * 100 for c in CLIP], sigma=[s * 100 for s in SIGMA]),
    "infinite bounds": changed(clip=[float("inf")] * K),
    "negative bounds": changed(clip=[-c for c in CLIP]),
    "bounds below float32": changed(clip=[1e-30] * K),
    "central trust": plan(trust="central").to_json(),
    "no guarantee": changed(protected=False, guarantee=GUARANTEE | {"status": "none"}),
    "no guarantee, called protected": changed(guarantee=GUARANTEE | {"status": "none"}),
    "bounded by the trainer": changed(
        bounded_by="trainer", guarantee=GUARANTEE | {"unit": "example"}
    ),
    "bounded by nobody": changed(bounded_by="nobody"),
    "another number of layers": changed(
        clip=[*CLIP, 1.0], sigma=[*SIGMA, 1.0], released=[True] * (K + 1)
    ),
    "nothing released": changed(released=[False] * K, sigma=[None] * K),
    "a query without noise": changed(queries=[["below-bound", 0.0]]),
    "an unknown query": changed(queries=[["raw", 1.0]]),
    "another law of noise": changed(family="none"),
    "not JSON": "{",
    "a list": "[]",
    "empty": " ",
    "deep": "[" * 5000 + "]" * 5000,
}
OBJECTS = (
    b"\x93NUMPY\x01\x00v\x00"
    + b"{'descr': '|O', 'fortran_order': False, 'shape': (1,), }".ljust(117)
    + b"\n"
    + b"cos\nsystem\n."
)
MODELS = {
    "NaN": frames.npy(np.full(len(MODEL), np.nan, np.float32)),
    "Inf": frames.npy(np.full(len(MODEL), np.inf, np.float32)),
    "float64": frames.npy(MODEL.double().numpy()),
    "too short": frames.npy(MODEL[:-1].numpy()),
    "too long": frames.npy(np.zeros(len(MODEL) + 1, np.float32)),
    "two dimensions": frames.npy(MODEL.numpy()[None]),
    "truncated": BODY[:-1],
    "with a tail": BODY + b"tail",
    "objects": OBJECTS,
    "empty": b"",
    "garbage": b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.",
}
WORKS: dict[str, Any] = {
    "an unknown model": {"model": {"name": "os:system"}},
    "a model that is not listed": {"model": {"name": "torch.nn:Linear"}},
    "another model's size": {"model": {"name": "mlp", "hidden": [8]}},
    "a huge model": {"model": {"name": "mlp", "hidden": [10**9]}},
    "an unknown option": {"model": {"name": "logistic", "hook": "x"}},
    "an option that overrides": {"model": {"name": "logistic", "classes": 1000}},
    "many options": {"model": {"name": "mlp", "hidden": [1] * 5000}},
    "no mechanism": {"mechanism": {"name": "none"}},
    "an unknown mechanism": {"mechanism": {"name": "raw"}},
    "a mechanism as text": {"mechanism": "snr-consistent"},
    "an unknown task": {"task": {"name": "read"}},
    "a task that is not listed": {"task": {"name": "regression"}},
    "a task as an object": {"task": "classification"},
    "an unknown option of the task": {"task": {"name": "classification", "hook": 1}},
    "endless training": {"training": {"epochs": 10**9}},
    "a negative rate": {"training": {"lr": -1.0}},
    "half a batch": {"training": {"batch_size": 0.5}},
    "a rate that no float holds": {"training": {"lr": 10**400}},
    "a momentum that no float holds": {"training": {"momentum": 10**400}},
    "a clip that no float holds": {"training": {"gradient_clip": 10**400}},
    "a batch that no tensor holds": {"training": {"batch_size": 2**70}},
    "no training": {"training": {"epochs": 0}},
    "an unknown setting": {"training": {"callback": "x"}},
    "more keys": {"eval": "1"},
}
