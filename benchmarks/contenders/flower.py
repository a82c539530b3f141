"""Flower's own simulation runtime: its FedAvg, one message per client, two one-CPU actors, plain
PyTorch inside.

`python -m benchmarks.contenders.flower [WORK]`: WORK is a module beside this one, `work` (default)
or `resnet_work`.
"""

from __future__ import annotations

import importlib
import logging
import sys
import time
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import nn

from benchmarks.contenders import work


@lru_cache(maxsize=1)
def _resident(name: str) -> tuple[Any, nn.Module]:
    # An actor process serves many clients; the model and data stay in it, as Flower recommends.
    torch.set_num_threads(1)
    job = _job(name)
    job.clients()
    return job, job.model()


def _job(name: str) -> Any:
    return importlib.import_module(f"benchmarks.contenders.{name}")


client_app = ClientApp()


@client_app.train()
def train(message: Message, context: Context) -> Message:
    from benchmarks.contenders import flower as here

    config = message.content["config"]
    job, module = here._resident(str(config["work"]))
    state = message.content["arrays"].to_torch_state_dict()
    x, y = job.examples(int(config["client"]))
    started = time.perf_counter()
    module.load_state_dict(state)
    if len(y):
        job.train(module, x, y)
    metrics = {"num-examples": max(len(y), 1), "training": time.perf_counter() - started}
    reply = RecordDict(
        {"arrays": ArrayRecord(module.state_dict()), "metrics": MetricRecord(metrics)}
    )
    return Message(content=reply, reply_to=message)


class _FedAvg(FedAvg):
    """FedAvg over the benchmark's cohorts: message i tells its node to be client i of the
    cohort.
    """

    work, number, training = "work", 0, 0.0

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        members = _job(self.work).cohort(self.number)
        for node, client in zip(sorted(grid.get_node_ids()), members, strict=False):
            task = ConfigRecord({"client": int(client), "work": self.work})
            content = RecordDict({"arrays": arrays, "config": task})
            yield Message(content=content, message_type="train", dst_node_id=node)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord | None, MetricRecord | None]:
        received = list(replies)
        self.training = sum(float(reply.content["metrics"]["training"]) for reply in received)
        return super().aggregate_train(server_round, received)


def main() -> None:
    logging.getLogger("flwr").setLevel(logging.ERROR)
    app, name = ServerApp(), (sys.argv[1:] or ["work"])[0]
    job = _job(name)

    @app.main()
    def server(grid: Grid, context: Context) -> None:
        strategy = _FedAvg(fraction_evaluate=0.0)
        strategy.work = name
        state = ArrayRecord(job.model().state_dict())
        while len(list(grid.get_node_ids())) < job.CLIENTS:
            time.sleep(0.1)

        def do_round(number: int) -> dict[str, float]:
            nonlocal state
            strategy.number = number
            state = strategy.start(grid, state, num_rounds=1).arrays
            return {"training": strategy.training}

        work.serve(do_round)

    backend = {
        "client_resources": {"num_cpus": 1, "num_gpus": 0.0},
        "init_args": {"num_cpus": job.WORKERS},
    }
    run_simulation(app, client_app, num_supernodes=job.CLIENTS, backend_config=backend)


if __name__ == "__main__":
    main()
