"""FedAvg with a budget, for an existing Flower app: the strategy of one model, one mechanism and one ledger."""

from __future__ import annotations

import copy
import hashlib
import numbers
import warnings
from collections.abc import Callable
from pathlib import Path

from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, Notice
from fedlgm.facts import RunFacts, Sampling
from fedlgm.keys import KeyRing
from fedlgm.mechanisms import Mechanism
from fedlgm.mechanisms.base import require_mechanism
from fedlgm.mechanisms.method import Method
from fedlgm.models.requirements import require_stateless
from fedlgm.privacy.guarantee import Trust
from fedlgm.privacy.ledger import Ledger
from fedlgm.transcript import Transcript
from strategies.cohort import CohortSampler
from strategies.layerwise import LayerwiseFedAvg
from strategies.nodes import OneNodePerClient
from strategies.releaser import Releaser
from strategies.server_optimizer import ServerStep, server_step

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class PrivateFedAvg(LayerwiseFedAvg):
    """Client-level private federated averaging of a torch model; the clients' apps are `clients.PrivateClientApp`s.

    Noise and ledger are made for `rounds` rounds at (epsilon, delta) under add-or-remove-one with Poisson sampling, or
    replace-one under local trust. Keys come from the operating system. A ledger that exists already is continued: what
    earlier runs of the same settings spent stays in it.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/ledger.sqlite"
        >>> strategy = PrivateFedAvg(torch.nn.Linear(3, 2), epsilon=8, delta=1e-5, clients=10, rounds=3, ledger=path)
        >>> strategy.method.facts.noise_multiplier > 0
        True

    Args:
        model: the model; its weights are the initial, public ones.
        mechanism: a registered name, "package.module:Class", or an object.
        epsilon: budget of all rounds.
        delta: its delta; below one over the number of clients.
        clients: number N of registered clients, one node each.
        rounds: number of rounds.
        rate: probability with which a client takes part in a round.
        ledger: SQLite file of what has been spent.
        trust: who adds the noise.
        optimizer: server step, or its name (see `ServerOptimizer`); by default the mean update is added.
        server_lr: learning rate of a named optimizer; by default 1 for "sgd" and "momentum", 0.01 for "adam", whose
            steps move every coordinate by about the rate.
        nodes: how to wait for nodes, and what to do when some fail.
        group_by: see `LayerTable.from_module`.

    Raises:
        ConfigError, PrivacyError, LedgerError: with one clear message.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        epsilon: float,
        delta: float,
        clients: int,
        rounds: int,
        ledger: Path | str,
        mechanism: str | Mechanism = "snr-consistent",
        rate: float = 1.0,
        trust: Trust = "central",
        optimizer: str | ServerStep | None = None,
        server_lr: float | None = None,
        nodes: OneNodePerClient | None = None,
        group_by: str | Callable[[str], str] = "module",
    ) -> None:
        chosen = mechanisms.get(mechanism) if isinstance(mechanism, str) else require_mechanism(mechanism)
        if chosen.unit != "client":
            raise ConfigError(
                f"{chosen.name} bounds examples, which only clients that train by it can do: PrivateFedAvg needs a "
                "mechanism that bounds clients' updates"
            )
        step = _step(optimizer, server_lr)
        relation = "replace-one" if trust == "local" else "add-remove"
        sampling = Sampling("poisson", clients, rate)
        facts = RunFacts(0.0, sampling, relation, trust, rounds, epsilon=epsilon, delta=delta)  # type: ignore[arg-type]
        method, keys = Method.of(model, chosen, facts, group_by), KeyRing.from_seed(None)
        self._module = copy.deepcopy(model)
        _warn_of(model, delta, clients)
        owner = hashlib.sha256(repr((chosen, method.facts, method.layers.names)).encode()).hexdigest()
        opened = Ledger(ledger, owner)
        super().__init__(
            method,
            Transcript.start(method.layers.flatten(model)),
            CohortSampler(sampling, keys),
            step,
            Releaser(keys, opened, redrawn=opened.position()),
            nodes or OneNodePerClient(),
        )

    def start(  # type: ignore[override]
        self,
        grid: Grid,
        initial_arrays: ArrayRecord | None = None,
        num_rounds: int | None = None,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run all rounds that are left, or `num_rounds` of them at most.

        `result.arrays` is what the model's `load_state_dict` takes; frozen parameters and buffers are as they were
        given to the constructor, which also gave the initial model: `initial_arrays` is taken for Flower's sake and not
        used. `evaluate_fn(round, arrays)` gets such arrays, too, and works on released models: it costs no privacy.

        Raises:
            ConfigError: `num_rounds` is no whole number, or negative.
            DivergedError: a round's model is NaN or infinite; `state_dict()` is that of the round before.
        """
        left = self.method.facts.rounds - self.transcript.rounds
        if num_rounds is not None and not (isinstance(num_rounds, numbers.Integral) and num_rounds >= 0):
            raise ConfigError(f"num_rounds must be a whole number of at least 0, got {num_rounds!r}")
        wanted = left if num_rounds is None else min(int(num_rounds), left)

        def evaluate(round: int, arrays: ArrayRecord) -> MetricRecord | None:
            return None if evaluate_fn is None else evaluate_fn(round, self._state())

        result = super().start(
            grid, self.initial_arrays(), wanted, timeout, train_config, evaluate_config,
            None if evaluate_fn is None else evaluate,
        )  # fmt: skip
        result.arrays = self._state()
        return result

    def _state(self) -> ArrayRecord:
        """The current model as its `load_state_dict` takes it, with frozen parameters and buffers."""
        self.method.layers.load_(self._module, self.transcript.models[-1])
        return ArrayRecord(self._module.state_dict())

    def state_dict(self) -> dict[str, Tensor]:
        """The current global model's trainable parameters by name."""
        named = self.method.layers.unflatten(self.transcript.models[-1])
        return {name: value.clone() for name, value in named.items()}

    def epsilon(self) -> float:
        """Epsilon spent so far at the run's delta, of everything in the ledger."""
        _, delta = self.method.facts.budget()
        return self.releaser.ledger.epsilon(delta, self.method.facts.accountant)

    def guarantee(self) -> str:
        """What is guaranteed, in one sentence."""
        plan = self.transcript.plan or self.method.plan(self.transcript)
        return plan.guarantee.sentence(noise_reproducible=False)


def _step(optimizer: str | ServerStep | None, lr: float | None) -> ServerStep:
    """The server's step, with a rate that fits it."""
    if lr is not None and not isinstance(optimizer, str | None):
        raise ConfigError(
            "server_lr is the rate of a named optimizer: an optimizer that is given as an object has its own"
        )
    if lr is not None and not (isinstance(lr, numbers.Real) and 0 < lr < float("inf")):
        raise ConfigError(f"server_lr must be a positive number, got {lr!r}")
    usual = 0.01 if optimizer == "adam" else 1.0
    return server_step(optimizer or "sgd", lr=usual if lr is None else lr, momentum=0.9)


def _warn_of(model: nn.Module, delta: float, clients: int) -> None:
    """What is allowed and probably not meant."""
    if delta >= 1 / clients:
        warnings.warn(
            Notice(
                f"delta = {delta:g} is not below 1/{clients}, one over the number of clients: such a guarantee allows "
                "one client to be given away entirely"
            ),
            stacklevel=3,
        )
    try:
        require_stateless(model)
    except ConfigError:
        warnings.warn(
            Notice(
                "the model has running statistics (BatchNorm): they stay on the clients, and the result has those of "
                "the initial model; use GroupNorm (fedlgm.models.to_groupnorm replaces them)"
            ),
            stacklevel=3,
        )
