"""A convolutional network on images, with SGD and flat clipping."""

from __future__ import annotations

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, DELTA = 100, 1, 1e-4

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images[:500] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
labels = torch.tensor(labels[:500])
train_loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(72, 10)
)
optimizer = optim.SGD(model.parameters(), lr=0.5)
privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.1,
    max_grad_norm=1.0,
)
criterion = nn.CrossEntropyLoss()
for _ in range(EPOCHS):
    for data, target in train_loader:
        optimizer.zero_grad()
        criterion(model(data), target).backward()
        optimizer.step()
epsilon = privacy_engine.get_epsilon(DELTA)
accuracy = (model(images).argmax(1) == labels).float().mean()
print(f"epsilon {epsilon:.2f} at delta {DELTA}, accuracy {accuracy:.2f}")
