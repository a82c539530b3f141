"""A convolutional network on images, with SGD and flat clipping."""

from __future__ import annotations

import torch
from sklearn.datasets import load_digits
from torch import nn

from fedlgm import Ledger, Method, RunFacts, Sampling, mechanisms
from fedlgm.example_level.central import train

BATCH, EPOCHS, DELTA = 100, 1, 1e-4

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images[:500] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
labels = torch.tensor(labels[:500])
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
)
sampling = Sampling("poisson", len(labels), BATCH / len(labels))
facts = RunFacts(1.1, sampling, rounds=EPOCHS * len(labels) // BATCH, delta=DELTA)
method = Method.of(model, mechanisms.get("dp-sgd", bound=1.0), facts)
with Ledger("ledger.sqlite", owner="script") as ledger:
    trained = train(model, images, labels, method, ledger=ledger, lr=0.5)
epsilon = trained.epsilon
accuracy = (model(images).argmax(1) == labels).float().mean()
print(f"epsilon {epsilon:.2f} at delta {DELTA}, accuracy {accuracy:.2f}")
