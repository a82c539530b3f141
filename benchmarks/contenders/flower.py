"""Flower's own simulation runtime: its FedAvg, one message a client, two one-CPU actors, plain PyTorch inside."""

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

from benchmarks.contenders import work


@lru_cache(maxsize=1)
def _resident() -> nn.Module:
    # An actor process serves many clients; model and data stay in it, as Flower recommends.
    torch.set_num_threads(1)
    work.clients()
    return work.model()


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    from benchmarks.contenders import flower as here

    module = here._resident()
    module.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x, y = work.examples(int(message.content["config"]["client"]))
    if len(y):
        work.train(module, x, y)
    reply = RecordDict(
        {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord({"num-examples": max(len(y), 1)})}
    )
    return Message(content=reply, reply_to=message)


class _FedAvg(FedAvg):
    """FedAvg over the benchmark's cohorts: message i tells its node to be client i of the cohort."""

    number = 0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        members = work.cohort(self.number)
        for node, client in zip(sorted(grid.get_node_ids()), members, strict=False):
            content = RecordDict({"arrays": arrays, "config": ConfigRecord({"client": int(client)})})
            yield Message(content=content, message_type="train", dst_node_id=node)


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app = ServerApp()

    @app.main()
    def server(grid: Grid, context: Context) -> None:
        strategy = _FedAvg(fraction_evaluate=0.0)
        state = ArrayRecord(work.model().state_dict())
        while len(list(grid.get_node_ids())) < work.CLIENTS:
            time.sleep(0.1)

        def do_round(number: int) -> None:
            nonlocal state
            strategy.number = number
            state = strategy.start(grid, state, num_rounds=1).arrays

        work.serve(do_round)

    backend = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": work.WORKERS}}
    run_simulation(app, client_app, num_supernodes=work.CLIENTS, backend_config=backend)


if __name__ == "__main__":
    main()
