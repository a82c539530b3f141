"""A network with GroupNorm, with AdamW, a schedule, per-layer clipping and a target epsilon."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from fedlgm import Ledger, Method, RunFacts, Sampling, mechanisms
from fedlgm.example_level.central import train

BATCH, EPOCHS, EPSILON, DELTA = 100, 2, 8.0, 1e-4

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images[:500] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
labels = torch.tensor(labels[:500])
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
)
sampling = Sampling("poisson", len(labels), BATCH / len(labels))
facts = RunFacts(0.0, sampling, rounds=EPOCHS * len(labels) // BATCH, epsilon=EPSILON, delta=DELTA)
method = Method.of(model, mechanisms.get("dp-sgd", style="per-layer", bound=1.0), facts)
adamw = {"optimizer": "adam", "lr": 0.01, "weight_decay": 0.01, "schedule": "cosine"}
with Ledger("ledger.sqlite", owner="script") as ledger:
    trained = train(model, images, labels, method, ledger=ledger, **adamw)
epsilon = trained.epsilon
accuracy = (model(images).argmax(1) == labels).float().mean()
print(f"epsilon {epsilon:.2f} at delta {DELTA}, accuracy {accuracy:.2f}")
