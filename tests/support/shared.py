"""Shared by all tests: one torch thread, tiny recipes, and federations whose clients have given
updates."""

from __future__ import annotations

import os
import signal
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import typer.main
import typer.testing
from command_line import _finished_once, finished, one_ray, run  # noqa: F401
from federations import Federation, GivenUpdates, GivenVotes, tiny_values
from flwr.clientapp import ClientApp
from torch import Tensor
from undrawn import undrawn  # noqa: F401

from clients import AnyClient, ClientData, OneClient
from clients.choice import client_class
from clients.cut_vote import VotingWork
from fedlgm import mechanisms
from fedlgm.errors import LedgerError
from fedlgm.extension import registration
from fedlgm.mechanisms.method import Method
from fedlgm.noise.correlation import strategies
from fedlgm.noise.keys import KeyRing
from fedlgm.planning import allocation
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import LocalTraining, kinds
from fedlgm.training.devices import Numerics
from fedlgm_lab.audits import audit
from simulations import engines
from simulations.config import recipe as recipes
from simulations.config.recipe import Recipe
from simulations.engines.local import LocalGrid
from strategies import (
    AnyNode,
    CohortSampler,
    OneNodePerClient,
    Releaser,
    ServerOptimizer,
    server_optimizer,
    strategy_class,
)

torch.set_num_threads(int(os.environ.get("FEDLGM_TEST_THREADS", "1")))  # see `make test-rounding`
hypothesis.settings.register_profile("shared cores", deadline=None)
hypothesis.settings.load_profile("shared cores")


REGISTRIES = (
    allocation._SHARES._items,
    mechanisms._REGISTRY._items,
    kinds._KINDS._items,
    engines._ENGINES._items,
    strategies._STRATEGIES._items,
    server_optimizer._OPTIMIZERS._items,
    audit._METHODS._items,
    registration._calls,
)
"""What `register` functions fill; the modules that own them register at import, and no other module
does."""


GENERATOR: Any = torch if torch.cuda.is_available() else torch.default_generator
"""`torch.manual_seed` also records its caller for each kind of device that is not there, in a
millisecond."""


@pytest.fixture
def short_path() -> Iterator[Path]:
    """A folder with a short path: the system allows a Unix socket about a hundred bytes."""
    with tempfile.TemporaryDirectory(prefix="fedlgm-", ignore_cleanup_errors=True) as path:
        yield Path(path)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test leaves nothing to the next one. A fixture for each of these would cost more than many
    of the tests.

    Models without a seed start alike. A registered name is gone, also for
    worker processes. Ctrl-C goes on ending the tests,
    although the command and Ray take signals over. urllib, which keeps the proxies of its first
    call, reads them again."""
    GENERATOR.manual_seed(0)
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    registries = [dict(registry) for registry in REGISTRIES]
    try:
        return (yield)
    finally:
        urllib.request.install_opener(None)  # type: ignore[arg-type]
        for number, handler in signals.items():
            signal.signal(number, handler)
        for registry, entries in zip(REGISTRIES, registries, strict=True):
            registry.clear()
            registry.update(entries)  # type: ignore[arg-type]


@pytest.fixture(scope="session", autouse=True)
def _commands_are_built_once() -> Iterator[None]:
    """Typer builds all commands from their signatures at every call, which a process does once and
    the tests often."""
    once = cache(typer.main.get_command)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(typer.main, "get_command", once)
        patch.setattr(typer.testing, "_get_command", once)
        yield


@pytest.fixture(scope="session")
def tiny() -> Callable[..., Recipe]:
    """Maker of tiny recipes; keywords are sections whose keys replace the usual ones (None removes
    a key)."""

    def make(**sections: dict[str, Any]) -> Recipe:
        raw = tiny_values()
        for section, values in sections.items():
            merged = raw[section] | values
            raw[section] = {key: value for key, value in merged.items() if value is not None}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return recipes.Recipe.model_validate(raw)

    return make


@pytest.fixture
def tiny_file(tmp_path: Path) -> Path:
    """The tiny recipe as a file."""
    path = tmp_path / "tiny.toml"
    path.write_text(recipes.Recipe.model_validate(tiny_values()).to_toml(), encoding="utf-8")
    return path


@pytest.fixture
def federate(tmp_path: Path) -> Iterator[Callable[..., Federation]]:
    """Maker of federations over plain vectors with given updates."""
    ledgers: list[Ledger] = []

    def make(
        updates: Callable[[int], Tensor],
        sizes: dict[str, int],
        *,
        mechanism: str | mechanisms.Mechanism = "snr-consistent",
        options: dict[str, Any] | None = None,
        multiplier: float = 1.0,
        sampling: Sampling | None = None,
        relation: str = "add-remove",
        trust: str = "central",
        rounds: int = 1,
        empty: frozenset[int] = frozenset(),
        seed: int = 0,
        optimizer: ServerOptimizer | None = None,
        dropout: float = 0.0,
        grid: Callable[[Any], LocalGrid] = LocalGrid,
        owner: str = "test",
        transcript: Transcript | None = None,
        nodes: Any = None,
        numerics: Numerics | None = None,
        **facts_options: Any,
    ) -> Federation:
        method = (
            mechanisms.get(mechanism, **(options or {}))
            if isinstance(mechanism, str)
            else mechanism
        )
        layers = method.table(LayerTable.from_sizes(sizes))
        facts = RunFacts(
            multiplier,
            sampling or Sampling("poisson", 10, 1.0),
            relation,
            trust,
            rounds,
            **facts_options,
        )  # type: ignore[arg-type]
        keys = KeyRing(seed)

        def source(client: int) -> ClientData:
            count = 0 if client in empty else 1
            return ClientData(
                torch.full((count, 1), float(client)), torch.zeros(count, dtype=torch.int64)
            )

        work = VotingWork(GivenUpdates(updates), LocalTraining(), source, votes=GivenVotes)  # type: ignore[arg-type]
        if isinstance(
            nodes, OneNodePerClient
        ):  # one app per client, each of which refuses the others'
            population = facts.sampling.population
            one_each = [
                OneClient(number, population, simulated=True) for number in range(population)
            ]
            served: Any = [
                client_class(method)(work, method, layers, keys, each).as_app(ClientApp())
                for each in one_each
            ]
        else:
            served = client_class(method)(work, method, layers, keys, AnyClient()).as_app(
                ClientApp()
            )
        ledger = Ledger(tmp_path / f"ledger-{owner}.sqlite", owner)
        ledgers.append(ledger)
        made = Federation(None, grid(served), ledger)  # type: ignore[arg-type]

        def on_round(record: Any, transcript: Transcript) -> None:
            made.records.append(record)
            made.means.append(transcript.mean)

        made.strategy = strategy_class(method)(
            Method(method, layers, facts),
            transcript or Transcript.start(torch.zeros(layers.size)),
            CohortSampler(facts.sampling, keys, dropout),
            optimizer or ServerOptimizer("sgd", 1.0),
            Releaser(keys, ledger, numerics or Numerics()),
            nodes or AnyNode(),
            on_round=on_round,
            continue_ledger=True,
        )
        return made

    yield make
    for ledger in ledgers:
        with suppress(LedgerError):  # closed by the test
            ledger.close()
