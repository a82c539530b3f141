"""An LSTM over characters, with large batches that are split to fit into memory."""

from __future__ import annotations

import torch
from opacus import PrivacyEngine
from opacus.layers import DPLSTM
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch import nn, optim
from torch.utils.data import DataLoader, TensorDataset

BATCH, EPOCHS, DELTA = 100, 1, 1e-4


class NameClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.lstm = DPLSTM(8, 16, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, names: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(names))
        return self.out(hidden[:, -1])


names = torch.randint(30, (400, 6), generator=torch.Generator().manual_seed(0))
languages = names[:, -1] % 3
train_loader = DataLoader(TensorDataset(names, languages), batch_size=BATCH)
model = NameClassifier()
optimizer = optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
privacy_engine = PrivacyEngine()
model, optimizer, train_loader = privacy_engine.make_private(
    module=model,
    optimizer=optimizer,
    data_loader=train_loader,
    noise_multiplier=1.0,
    max_grad_norm=1.5,
)
criterion = nn.CrossEntropyLoss()
for _ in range(EPOCHS):
    with BatchMemoryManager(
        data_loader=train_loader, max_physical_batch_size=50, optimizer=optimizer
    ) as loader:
        for data, target in loader:
            optimizer.zero_grad()
            criterion(model(data), target).backward()
            optimizer.step()
epsilon = privacy_engine.get_epsilon(DELTA)
accuracy = (model(names).argmax(1) == languages).float().mean()
print(f"epsilon {epsilon:.2f} at delta {DELTA}, accuracy {accuracy:.2f}")
