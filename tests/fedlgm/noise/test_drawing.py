"""Threads of one process that draw from PyTorch's global generators, as dropout does."""

from __future__ import annotations

import multiprocessing
import threading
from collections.abc import Callable

import pytest
import torch
from own_objects import DATA, SMALL
from torch import nn

import simulations
from fedlgm.errors import ConfigError
from fedlgm.extension.trial import check_losses
from fedlgm.training import devices, tasks
from fedlgm.training.devices import drawing, fork_rng
from fedlgm.training.models import require_repeatable


class Dropping(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(5, 16), nn.Tanh(), nn.Dropout(0.5), nn.Linear(16, 2))


def in_threads(count: int, work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_blocks_of_several_threads_draw_as_one_after_another() -> None:
    with fork_rng(3):
        alone = [torch.rand(1).item() for _ in range(300)]
    drawn: dict[int, list[float]] = {}

    def work(number: int) -> None:
        with fork_rng(3):
            drawn[number] = [torch.rand(1).item() for _ in range(300)]

    in_threads(4, work)
    assert all(drawn[number] == alone for number in range(4))


def test_runs_in_threads_are_those_of_one_thread(tmp_path) -> None:
    """Two seeded runs with dropout disturbed each other: their models differed from one call to the
    next."""

    def work(number: int) -> None:
        made[number] = simulations.simulate(
            model=Dropping, data=DATA, overrides=SMALL, run_dir=tmp_path / str(number),
            evaluate=lambda round, module: {"drawn": torch.rand(1).item()},
        )["model_sha256"]  # fmt: skip

    made: dict[int, str] = {}
    work(0)
    in_threads(3, lambda number: work(number + 1))
    assert len({*made.values()}) == 1
    assert len(made) == 4


def test_a_trial_of_a_loss_does_not_draw_beside_other_threads() -> None:
    """It called a model in training mode outside of every block, and so changed the numbers of a
    run in another thread: one of twelve runs was refused."""
    x, y = torch.zeros(4, 5), torch.tensor([0, 1, 0, 1])
    model, state = Dropping().train(), torch.default_generator.get_state()
    check_losses(model, tasks.get("classification"), x, y)
    assert torch.equal(torch.default_generator.get_state(), state)


def test_a_forked_process_does_not_wait_for_a_thread_that_it_lacks() -> None:
    held, released = threading.Event(), threading.Event()

    def hold() -> None:
        with drawing():
            held.set()
            released.wait(60)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait(60)
    child = multiprocessing.get_context("fork").Process(target=devices.drawing().__enter__)
    child.start()
    child.join(30)
    released.set()
    thread.join()
    assert child.exitcode == 0


def test_a_thread_that_draws_beside_is_named() -> None:
    class Drawing(nn.Linear):
        def forward(self, x):
            thread = threading.Thread(target=torch.rand, args=(1,))
            thread.start()
            thread.join()
            return super().forward(x) + torch.rand(1)

    waiting = threading.Event()
    beside = threading.Thread(target=waiting.wait, args=(60,))
    beside.start()
    try:
        with pytest.raises(
            ConfigError, match="or another thread of this program draws from PyTorch's global gener"
        ):
            require_repeatable(Drawing(2, 2), torch.zeros(3, 2))
    finally:
        waiting.set()
        beside.join()
