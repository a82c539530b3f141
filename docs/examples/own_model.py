import torch
from sklearn.datasets import load_digits

import simulations

x, y = load_digits(return_X_y=True)
data = {"train": (x[:1400] / 16, y[:1400]), "test": (x[1400:] / 16, y[1400:])}
net = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10))
result = simulations.simulate(
    model=net, data=data, overrides=["federation.clients=100", "privacy.epsilon=8"]
)
print(result.accuracy, result.epsilon, result["attack"], result.guarantee)
