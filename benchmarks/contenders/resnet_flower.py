"""Flower's simulation runtime on `resnet_work`: federated averaging, with a stopwatch around local training."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable
from functools import lru_cache

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from benchmarks.contenders import resnet_work as here
from benchmarks.contenders import work


@lru_cache(maxsize=1)
def _resident() -> nn.Module:
    torch.set_num_threads(1)
    here.clients()
    return here.model()


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    from benchmarks.contenders import resnet_flower

    module = resnet_flower._resident()
    state = message.content["arrays"].to_torch_state_dict()
    x, y = here.examples(int(message.content["config"]["client"]))
    started = time.perf_counter()
    module.load_state_dict(state)
    here.train(module, x, y)
    metrics = {"num-examples": len(y), "training": time.perf_counter() - started}
    reply = RecordDict({"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord(metrics)})
    return Message(content=reply, reply_to=message)


class _FedAvg(FedAvg):
    """FedAvg over the benchmark's cohorts that adds up the training times."""

    number, training = 0, 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        for node, client in zip(sorted(grid.get_node_ids()), here.cohort(self.number), strict=False):
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({"client": int(client)})})
            yield Message(content=content, message_type="train", dst_node_id=node)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received = list(replies)
        self.training = sum(float(reply.content["metrics"]["training"]) for reply in received)
        return super().aggregate_train(server_round, received)


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = ServerApp()

    @app.main()
    def server(grid: Grid, context: Context) -> None:
        strategy = _FedAvg(fraction_evaluate=0.0)
        state = ArrayRecord(here.model().state_dict())
        while len(list(grid.get_node_ids())) < here.CLIENTS:
            time.sleep(0.1)

        def do_round(number: int) -> dict[str, float]:
            nonlocal state
            strategy.number = number
            state = strategy.start(grid, state, num_rounds=1).arrays
            return {"training": strategy.training}

        work.serve(do_round)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": here.WORKERS}}
    run_simulation(app, client_app, num_supernodes=here.CLIENTS, backend_config=backend)


if __name__ == "__main__":
    main()
