"""Apple's pfl on one process's share of the same work:
`python -m benchmarks.contenders.pfl_simulator SHARE`.
"""

from __future__ import annotations

import itertools
import json
import sys
import time
from typing import Any

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn

from benchmarks.contenders import work


class _Model(nn.Module):
    """The benchmark's model with the two methods that pfl requires."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = work.model()

    def loss(self, x: Tensor, y: Tensor, eval: bool = False) -> Tensor:
        return nn.functional.cross_entropy(self.inner(x), y)

    @torch.no_grad()
    def metrics(self, x: Tensor, y: Tensor, eval: bool = True) -> dict[str, Any]:
        return {"loss": Weighted.from_unweighted(float(self.loss(x, y)))}


class _OnDemand(TrainingProcessCallback):
    """Reports the time at the end of each round, and waits for the next line."""

    started = 0.0

    def on_train_begin(self, *, model: Any) -> Metrics:
        return Metrics()

    def after_central_iteration(
        self, aggregate_metrics: Any, model: Any, *, central_iteration: int
    ) -> tuple[bool, Metrics]:
        answer = (
            {"seconds": time.perf_counter() - self.started} if self.started else {"ready": True}
        )
        print(json.dumps(answer), flush=True)
        stop = not sys.stdin.readline()
        self.started = time.perf_counter()
        return stop, Metrics()


def main() -> None:
    torch.set_num_threads(1)
    share = int(sys.argv[1])
    users = itertools.chain.from_iterable(
        map(int, work.shares(number)[share]) for number in itertools.count()
    )
    data = FederatedDataset(
        lambda user: Dataset(work.examples(user), user_id=str(user)), lambda: next(users)
    )
    net = _Model()
    model = PyTorchModel(
        net,
        local_optimizer_create=torch.optim.Adam,
        central_optimizer=torch.optim.SGD(net.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=10_000,
            evaluation_frequency=10_000,
            train_cohort_size=work.COHORT // work.WORKERS,
            val_cohort_size=0,
        ),
        SimulatedBackend(training_data=data, val_data=data),
        model,
        NNTrainHyperParams(
            local_num_epochs=work.EPOCHS, local_learning_rate=work.LR, local_batch_size=work.BATCH
        ),
        NNEvalHyperParams(local_batch_size=1000),
        callbacks=[_OnDemand()],
    )


if __name__ == "__main__":
    main()
