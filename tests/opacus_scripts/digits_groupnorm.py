"""A network with GroupNorm, with AdamW, a schedule, per-layer clipping and a target epsilon."""

from __future__ import annotations

import torch
from opacus import PrivacyEngine
from sklearn.datasets import load_digits
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, EPSILON, DELTA = 100, 2, 8.0, 1e-4

images, labels = load_digits(return_X_y=True)
images = torch.tensor(images[:500] / 16, dtype=torch.float32).view(-1, 1, 8, 8)
labels = torch.tensor(labels[:500])
train_loader = DataLoader(TensorDataset(images, labels), batch_size=BATCH)
model = nn.Sequential(
    nn.Conv2d(1, 8, 3), nn.GroupNorm(2, 8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10)
)
layers = len(list(model.parameters()))
optimizer = optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private_with_epsilon(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    epochs=EPOCHS,
    target_epsilon=EPSILON,
    target_delta=DELTA,
    clipping="per_layer",
    max_grad_norm=[1.0 / layers**0.5] * layers,
)
scheduler = optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train_loader))
criterion = nn.CrossEntropyLoss()
for _ in range(EPOCHS):
    for data, target in train_loader:
        optimizer.zero_grad()
        criterion(model(data), target).backward()
        optimizer.step()
        scheduler.step()
epsilon = privacy_engine.get_epsilon(DELTA)
accuracy = (model(images).argmax(1) == labels).float().mean()
print(f"epsilon {epsilon:.2f} at delta {DELTA}, accuracy {accuracy:.2f}")
