"""An LSTM over characters, with large batches that are split to fit into memory."""

from __future__ import annotations

import torch
from torch import nn

from fedlgm import Ledger, Method, RunFacts, Sampling, mechanisms
from fedlgm.example_level.central import train

BATCH, EPOCHS, DELTA = 100, 1, 1e-4


class NameClassifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.lstm = nn.LSTM(8, 16, batch_first=True)
        self.out = nn.Linear(16, 3)

    def forward(self, names: torch.Tensor) -> torch.Tensor:
        hidden, _ = self.lstm(self.embedding(names))
        return self.out(hidden[:, -1])


names = torch.randint(30, (400, 6), generator=torch.Generator().manual_seed(0))
languages = names[:, -1] % 3
model = NameClassifier()
sampling = Sampling("poisson", len(languages), BATCH / len(languages))
facts = RunFacts(1.0, sampling, rounds=EPOCHS * len(languages) // BATCH, delta=DELTA)
method = Method.of(model, mechanisms.get("dp-sgd", bound=1.5), facts)
with Ledger("ledger.sqlite", owner="script") as ledger:
    trained = train(model, names, languages, method, ledger=ledger, lr=1.0, momentum=0.9)
epsilon = trained.epsilon
accuracy = (model(names).argmax(1) == languages).float().mean()
print(f"epsilon {epsilon:.2f} at delta {DELTA}, accuracy {accuracy:.2f}")
