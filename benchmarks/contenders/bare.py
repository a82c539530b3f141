"""A bare PyTorch loop: each process trains its share of the cohort and returns the sum of its
models.
"""

from __future__ import annotations

import multiprocessing
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.contenders import work


def _train(job: tuple[dict[str, np.ndarray], np.ndarray]) -> list[np.ndarray]:
    torch.set_num_threads(1)
    state, members = job
    module = work.model()
    total: list[Tensor] | None = None
    for client in members:
        module.load_state_dict({name: torch.from_numpy(value) for name, value in state.items()})
        x, y = work.examples(int(client))
        if len(y):
            work.train(module, x, y)
        values = [value.clone() for value in module.state_dict().values()]
        total = values if total is None else [a + b for a, b in zip(total, values, strict=True)]
    return [value.cpu().numpy() for value in total or []]


def main() -> None:
    work.clients()
    on_cpu: nn.Module = work.model("cpu")  # a process that has used a GPU cannot be forked
    state: dict[str, Any] = {name: value.numpy() for name, value in on_cpu.state_dict().items()}
    with multiprocessing.get_context("fork").Pool(work.WORKERS) as pool:

        def do_round(number: int) -> None:
            sums = pool.map(_train, [(state, members) for members in work.shares(number)])
            for name, *parts in zip(state, *sums, strict=True):
                state[name] = sum(parts) / work.COHORT

        work.serve(do_round)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
