"""Model, data and training of the app: digits in shares of a Dirichlet distribution."""

import numpy as np
import torch
import torch.nn as nn
import torch.nn.functional as F
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, TensorDataset


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc1 = nn.Linear(64, 16)
        self.fc2 = nn.Linear(16, 10)

    def forward(self, x):
        return self.fc2(F.relu(self.fc1(x)))


def _digits():
    x, y = load_digits(return_X_y=True)
    return torch.tensor(x, dtype=torch.float32) / 16, torch.tensor(y)


def load_data(partition_id, num_partitions):
    x, y = _digits()
    shares = np.random.default_rng(42).dirichlet(np.ones(num_partitions), 10)
    owner = np.array(
        [np.searchsorted(np.cumsum(shares[c]), (i % 97) / 97) for i, c in enumerate(y)]
    )
    mine = torch.tensor(np.flatnonzero(owner == partition_id))
    return DataLoader(TensorDataset(x[mine], y[mine]), batch_size=32, shuffle=True)


def train(net, trainloader, epochs, lr, device):
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9)
    net.train()
    running_loss = 0.0
    for _ in range(epochs):
        for images, labels in trainloader:
            optimizer.zero_grad()
            loss = F.cross_entropy(net(images.to(device)), labels.to(device))
            loss.backward()
            optimizer.step()
            running_loss += loss.item()
    return running_loss / max(len(trainloader), 1)


def test(net, device):
    x, y = _digits()
    with torch.no_grad():
        outputs = net(x.to(device))
    return F.cross_entropy(outputs, y).item(), (outputs.argmax(1) == y).float().mean().item()
