"""FedAvg with a privacy budget, for an existing Flower app. Each strategy object has one model, one
mechanism and one ledger.
"""

from __future__ import annotations

import hashlib
import numbers
import traceback
import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from flwr.app import ArrayRecord, ConfigRecord, Message, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result
from torch import Tensor, nn

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, Notice
from fedlgm.extension.loader import misfit
from fedlgm.files import path_of
from fedlgm.mechanisms import BoundsExamples, Mechanism
from fedlgm.mechanisms.mechanism import require_mechanism
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing
from fedlgm.planning import trust as noised_by
from fedlgm.planning.facts import LocalTraining, RunFacts, Sampling
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.guarantee import Guarantee, Trust
from fedlgm.privacy.ledger import Ledger
from fedlgm.training.models.arrays import of_arrays
from fedlgm.training.models.copies import copy_model
from fedlgm.training.models.requirements import require_stateless, require_trainable
from strategies.cohort import CohortSampler
from strategies.layerwise import LayerwiseFedAvg
from strategies.nodes import OneNodePerClient
from strategies.own_aggregate import Figures, copy_strategy, unsent_figure
from strategies.releaser import Releaser
from strategies.server_optimizer import ServerStep, server_step, usual_lr

_MOMENTUM = 0.9
_INSTEAD = {
    (
        "fraction_train",
        "fraction_fit",
    ): "rate is the probability with which a client takes part in a round",
    (
        "min_train",
        "min_fit",
        "min_available",
    ): "clients is the number of clients, and nodes says how to wait for their nodes",
    ("fraction_evaluate", "min_evaluate", "evaluate_metrics", "train_metrics", "fit_metrics"): (
        "clients' own figures are not protected and stay with them: evaluate on the server with "
        "start(evaluate_fn=...)"
    ),
    (
        "weighted_by",
    ): "all clients have the same weight, because weights by example counts would reveal the "
    "counts: leave it out",
    (
        "proximal_mu",
    ): "the proximal term belongs to the client: add it to the loss under @app.train()",
    ("eta", "server_learning_rate"): "server_lr is the rate of a named optimizer",
    (
        "evaluate_fn",
        "on_fit_config",
        "on_evaluate_config",
    ): "give evaluate_fn and train_config to start",
    (
        "bound",
        "clip",
    ): "it is an option of the mechanism: mechanism=fedlgm.mechanisms.get('uniform', bound=0.5)",
    ("initial_parameters",): "the model, the first argument, has the initial weights",
}
"""What to use instead of the arguments of Flower's strategies. Each key lists the beginnings of
names of arguments.
"""

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


class PrivateFedAvg(LayerwiseFedAvg):
    """Federated averaging of a torch model with client-level differential privacy. The clients run
    a `clients.PrivateClientApp`.

    The noise is calibrated so that `rounds` rounds with Poisson sampling satisfy (epsilon, delta)
    under the add-or-remove-one relation, or under the replace-one relation with local trust. The
    keys of the noise are drawn from the operating system. A ledger that contains rounds of an
    earlier process is refused unless `continue_ledger` is set. At its end, `start` prints the
    ledger's epsilon.

    Example:
        >>> import tempfile, torch
        >>> path = tempfile.mkdtemp() + "/ledger.sqlite"
        >>> strategy = PrivateFedAvg(torch.nn.Linear(3, 2), epsilon=8, delta=1e-5, clients=10, rounds=3, ledger=path)
        >>> strategy.method.facts.noise_multiplier > 0
        True

    Args:
        model: the model, or the list of NumPy arrays that an app without torch sends. The model's
            weights, or the arrays, are the initial weights, which are public.
        mechanism: the mechanism, as an object, a registered name, "name:variant" or
            "package.module:Class".
        epsilon: budget of all rounds together.
        delta: delta of the budget; it should be below one over the number of clients.
        clients: number N of registered clients, each of which has one node.
        rounds: number of rounds.
        rate: probability with which each client takes part in a round.
        ledger: SQLite file that records the spent budget.
        trust: trust model, which determines who adds the noise.
        training: a description of the app's training, for mechanisms in the framework of the
            LaDP-FL paper ("ladp:published"). Their noise is computed from this description, and
            nothing checks that the app trains as described.
        optimizer: the server's optimizer, as an object or a name (see `ServerOptimizer`); by
            default the mean update is added to the model.
        server_lr: learning rate of a named optimizer. The default is 1 for "sgd". It is 0.1 for
            "momentum", with which each update is added up to ten times over the rounds, and 0.01
            for "adam" and "yogi", in whose steps each coordinate moves by about the rate.
        nodes: settings for waiting for nodes and for failures.
        group_by: see `LayerTable.from_module`.
        continue_ledger: whether the ledger may contain rounds of an earlier process with the same
            settings; the costs of all rounds then add up. To resume a run after m rounds,
            also load the saved weights into the model and pass `num_rounds=rounds - m` to `start`.
        flowers: arguments of Flower's own strategies. Each of them is refused with a message that
            names its replacement.

    Raises:
        ConfigError, PrivacyError, LedgerError: an argument cannot be used (for a model see
            `fedlgm.training.models.require_trainable`); the message says why.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[np.ndarray],
        *,
        epsilon: float,
        delta: float,
        clients: int,
        rounds: int,
        ledger: Path | str,
        mechanism: str | Mechanism = "snr-consistent",
        rate: float = 1.0,
        trust: Trust = "central",
        training: LocalTraining | None = None,
        optimizer: str | ServerStep | None = None,
        server_lr: float | None = None,
        nodes: OneNodePerClient | None = None,
        group_by: str | Callable[[str], str] = "module",
        continue_ledger: bool = False,
        **flowers: Any,
    ) -> None:
        _refuse(flowers)
        module: nn.Module = of_arrays(model)
        if isinstance(module, nn.Module):  # the layer table refuses any other object
            require_trainable(module, repr(type(module).__name__), statistics=True)
        if isinstance(mechanism, str):
            name, variant = mechanisms.split(mechanism)
            mechanism = mechanisms.get(name, variant=variant or "sound")
        chosen = require_mechanism(mechanism)
        if isinstance(chosen, BoundsExamples):
            raise ConfigError(
                f"{chosen.name} bounds the gradient of each example during training, and "
                "PrivateClientApp does not: PrivateFedAvg needs a mechanism that bounds clients' "
                "updates"
            )
        if not isinstance(nodes, OneNodePerClient | None):
            raise ConfigError(
                f"nodes must be a strategies.OneNodePerClient(...), got {nodes!r}; clients is the "
                "number N"
            )
        step = _step(optimizer, server_lr)
        sampling, relation = Sampling("poisson", clients, rate), noised_by.get(trust).relation
        if not isinstance(training, LocalTraining | None):
            raise ConfigError(f"training must be a fedlgm.LocalTraining(...), got {training!r}")
        facts = RunFacts(
            0.0,
            sampling,
            relation,
            trust,
            rounds,
            epsilon=epsilon,
            delta=delta,
            training=training or LocalTraining(),
        )
        method, keys = Method.of(module, chosen, facts, group_by), KeyRing.from_seed(None)
        start = Transcript.start(method.layers.flatten(module))
        if any(noisy.query.of_data for noisy in method.plan(start).queries):
            raise ConfigError(
                f"{chosen.name} asks each client for a vote by the loss on its data, and no "
                "PrivateClientApp can compute this loss: use mechanism='water-filling' or "
                "'gaussian'"
            )
        self._module = copy_model(module)
        _warn_of(module, delta, clients)
        owner = hashlib.sha256(
            repr((chosen, method.facts, method.layers.names)).encode()
        ).hexdigest()
        opened = Ledger(path_of("ledger", ledger), owner)
        self._new, self._starting = not continue_ledger, False
        self._held = ExitStack()
        self._tried = self._on_trial = False  # a subclass' `aggregate_train`
        super().__init__(
            method,
            start,
            CohortSampler(sampling, keys),
            step,
            Releaser(keys, opened, redrawn=opened.position(), stated=True),
            nodes or OneNodePerClient(),
            continue_ledger=continue_ledger,
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
        """Run all remaining rounds, or at most `num_rounds` of them, and print what the ledger has
        spent.

        `result.arrays` has the form of the model's `load_state_dict`. Its frozen parameters and
        buffers are those of the model that the constructor was given. That model is also the
        initial model: `initial_arrays` is accepted for compatibility with Flower but not used, and
        a notice warns of this if its weights differ from the model's. `evaluate_fn(round, arrays)`
        gets arrays of the same form. These arrays are released models, so an evaluation on public
        data costs no privacy.

        Raises:
            ConfigError: `num_rounds` is negative or not a whole number; or another argument has a
                wrong type.
            DivergedError: the model of a round contains NaN or infinity; `state_dict()` still
                returns the model of the previous round.
            LedgerError: another run is charging the ledger, or has charged rounds since this
                strategy was created.
        """
        left = self.method.facts.rounds - self.transcript.rounds
        if num_rounds is not None and not (
            isinstance(num_rounds, numbers.Integral) and num_rounds >= 0
        ):
            raise ConfigError(
                f"num_rounds must be a whole number of at least 0, got {num_rounds!r}"
            )
        if num_rounds is not None and num_rounds > (planned := self.method.facts.rounds):
            text = (
                f"num_rounds = {num_rounds} is ignored: the noise is calibrated to rounds = "
                f"{planned} of PrivateFedAvg, which are run"
            )
            warnings.warn(Notice(text), stacklevel=3)
        wanted = left if num_rounds is None else min(int(num_rounds), left)
        if wanted and not hasattr(grid, "send_and_receive"):
            kind = type(grid).__name__
            raise ConfigError(
                f"grid must be the first argument of the function under @app.main(), got {kind}"
            )
        _require_types(initial_arrays, (train_config, evaluate_config), evaluate_fn)
        if initial_arrays is not None and self.transcript.rounds == 0:
            _warn_of_arrays(initial_arrays, (self._state(), self.initial_arrays()))
        self._hold()
        self._starting = True
        try:
            evaluate = None if evaluate_fn is None else partial(_evaluate, evaluate_fn)
            result = super().start(
                grid, self._state(), wanted, timeout, train_config, evaluate_config, evaluate
            )
        except KeyError as error:
            method = type(self).aggregate_train
            if method is PrivateFedAvg.aggregate_train or method.__name__ not in _functions(error):
                raise
            raise self._missing_metric_error(error) from error
        finally:
            self._starting = False
            self._held.close()
            self._print_cost()
        result.arrays = self._state()
        return result

    def summary(self) -> None:
        """Print nothing (see `LayerwiseFedAvg.summary`).

        Raises:
            ConfigError: another strategy, which wraps this strategy, calls `summary`.
        """
        if not self._starting:
            raise ConfigError(
                "another strategy wraps PrivateFedAvg, such as one of Flower's "
                "DifferentialPrivacy strategies: it would add a second bound and second noise, "
                "which no ledger counts; start PrivateFedAvg itself"
            )

    def initialize_parameters(self, *_: Any, **__: Any) -> Any:
        """Refuse to be started through Flower's older interface.

        Raises:
            ConfigError: always.
        """
        raise ConfigError(
            "start_simulation, start_server and ServerAppComponents start strategies of Flower's "
            "older interface: call PrivateFedAvg(...).start(grid) in the function under "
            "@app.main() of a ServerApp"
        )

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return the messages of the round. They contain the strategy's model as one vector;
        `arrays`, the same model in the form of a `state_dict`, is not used.

        If a subclass overrides `aggregate_train`, that method is first tried once on a copy of the
        strategy, with the reply of a client whose update is zero.

        Raises:
            ConfigError: a subclass's `aggregate_train` reads a metric that no client sends. The
                round is then not charged.
        """
        if not self._tried and type(self).aggregate_train is not PrivateFedAvg.aggregate_train:
            trial = copy_strategy(self)
            trial._on_trial = True
            aggregate = partial(trial.aggregate_train, server_round)
            missing = unsent_figure(aggregate, server_round, self.method.layers.size)
            if missing is not None:
                raise self._missing_metric_error(missing)
        self._tried = True
        if not self._starting:
            self._hold()
        return super().configure_train(server_round, self.initial_arrays(), config, grid)

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Return the next model in the form of the model's `load_state_dict`, and the round's
        number (see `LayerwiseFedAvg.aggregate_train`).
        """
        if self._on_trial:
            return self._state(), Figures({"round": self.transcript.rounds + 1})
        try:
            _, metrics = super().aggregate_train(server_round, replies)
        finally:
            if not self._starting:
                self._held.close()
        if not self._starting and self.transcript.rounds == self.method.facts.rounds:
            self._print_cost()  # a subclass's `start` has run the rounds
        return self._state(), metrics

    def _hold(self) -> None:
        """Lock the ledger until `_held` is closed. Before the first round of a new run, the ledger
        must not contain other rounds.
        """
        with ExitStack() as held:
            held.enter_context(self.releaser.ledger.hold())
            if self._new and not self._configured:
                self.method.require_rounds(self.releaser.ledger, self.transcript)
            self._held = held.pop_all()

    def _missing_metric_error(self, missing: KeyError) -> ConfigError:
        return ConfigError(
            f"{type(self).__name__}.aggregate_train looks for {missing}, which no client sends: "
            "clients' metrics are not protected and stay with them; evaluate on the server with "
            "start(evaluate_fn=...)"
        )

    def _print_cost(self) -> None:
        from fedlgm.privacy.attackers import attack_rates  # loads the accountants

        epsilon, (budget, delta) = self.epsilon(), self.method.facts.budget()
        above = f" (above the budget of {budget:g})" if epsilon > budget else ""
        head, unit = self.releaser.ledger.head(), self._guarantee().unit
        found = attack_rates(self.releaser.ledger).sentence(f"{unit}s")
        print(
            f"fedlgm: epsilon {epsilon:.4g}{above} at delta {delta:g}: {found}; guarantee: "
            f"{self.guarantee()}; ledger head {head}",
            flush=True,
        )

    def _state(self) -> ArrayRecord:
        """Return the current model in the form of its `load_state_dict`, with frozen parameters and
        buffers.
        """
        self.method.layers.load_(self._module, self.transcript.models[-1])
        return ArrayRecord(self._module.state_dict())

    def state_dict(self) -> dict[str, Tensor]:
        """Return the trainable parameters of the current global model by name."""
        named = self.method.layers.unflatten(self.transcript.models[-1])
        return {name: value.clone() for name, value in named.items()}

    def epsilon(self) -> float:
        """Compute the epsilon at the run's delta that the charges in the ledger have spent so far;
        charges of earlier runs in the same ledger are included.
        """
        _, delta = self.method.facts.budget()
        return self.releaser.ledger.epsilon(delta, self.method.facts.accountant)

    def guarantee(self) -> str:
        """Return the guarantee in one sentence."""
        return self._guarantee().sentence(noise_reproducible=False)

    def _guarantee(self) -> Guarantee:
        return (self.transcript.plan or self.method.plan(self.transcript)).guarantee


def _refuse(flowers: dict[str, Any]) -> None:
    """Refuse arguments of Flower's strategies, and name their replacements."""
    problems = []
    for name in flowers:
        instead = next(
            (remedy for names, remedy in _INSTEAD.items() if name.startswith(names)), None
        )
        problems.append(f"{name!r}: {instead or 'its arguments are in docs/how-to/flower-app.md'}")
    if problems:
        raise ConfigError(f"PrivateFedAvg has no argument {'; nor '.join(problems)}")


def _step(optimizer: str | ServerStep | None, lr: float | None) -> ServerStep:
    """Return the server's optimizer. A named optimizer without a rate gets its usual rate."""
    if lr is not None and not isinstance(optimizer, str | None):
        raise ConfigError(
            "server_lr is the rate of a named optimizer: an optimizer that is given as an object "
            "has its own rate"
        )
    if lr is not None and not (isinstance(lr, numbers.Real) and 0 < lr < float("inf")):
        raise ConfigError(f"server_lr must be a positive number, got {lr!r}")
    rate = usual_lr(optimizer) if lr is None else lr
    return server_step(optimizer or "sgd", lr=rate, momentum=_MOMENTUM)


def _require_types(arrays: Any, configs: Iterable[Any], evaluate_fn: Any) -> None:
    """Refuse arguments of `start` on which Flower's code would fail, in some cases only after a
    round.
    """
    if not isinstance(arrays, ArrayRecord | None):
        raise ConfigError(f"initial_arrays must be an ArrayRecord, got {type(arrays).__name__}")
    for config in configs:
        if not isinstance(config, ConfigRecord | None):
            kind = type(config).__name__
            raise ConfigError(
                f"train_config must be a ConfigRecord, such as ConfigRecord({{'lr': 0.1}}), got "
                f"{kind}"
            )
    if evaluate_fn is not None and not callable(evaluate_fn):
        raise ConfigError(f"evaluate_fn must be a function (round, arrays), got {evaluate_fn!r}")
    if evaluate_fn is not None and (why := misfit(evaluate_fn, 0, ArrayRecord())):
        raise ConfigError(f"evaluate_fn is called with (round, arrays): {why}")


def _functions(error: BaseException) -> list[str]:
    """List the names of the functions through which an error passed."""
    return [frame.name for frame in traceback.extract_tb(error.__traceback__)]


def _evaluate(evaluate_fn: Evaluate, round: int, arrays: ArrayRecord) -> MetricRecord | None:
    """Call a user's `evaluate_fn` and check what it returns, because Flower would fail on an
    unusable result only after the last round.
    """
    figures: Any = evaluate_fn(round, arrays)
    if not isinstance(figures, MetricRecord | None):
        raise ConfigError(
            "evaluate_fn must return a MetricRecord, such as MetricRecord({'loss': 0.1, "
            f"'accuracy': 0.9}}), or None, got {type(figures).__name__}; (loss, metrics) belongs "
            "to Flower's older interface"
        )
    return figures


def _warn_of_arrays(given: ArrayRecord, records: Iterable[ArrayRecord]) -> None:
    """Warn if the given initial weights, such as those of a pretrained model, are not the weights
    in `records`, from which the run starts.
    """
    theirs = given.to_numpy_ndarrays()
    for record in records:
        ours = record.to_numpy_ndarrays()
        if len(ours) == len(theirs) and all(map(np.array_equal, ours, theirs)):
            return
    warnings.warn(
        Notice(
            "initial_arrays differ from the weights of the model that PrivateFedAvg was made "
            "with, which is the one that is trained: load them into that model first"
        ),
        stacklevel=3,
    )


def _warn_of(model: nn.Module, delta: float, clients: int) -> None:
    """Warn of settings that are allowed but probably not intended."""
    if delta >= 1 / clients:
        warnings.warn(
            Notice(
                f"delta = {delta:g} is not below 1/{clients}, one over the number of clients: such "
                "a guarantee permits the full publication of one client's data"
            ),
            stacklevel=3,
        )
    try:
        require_stateless(model)
    except ConfigError:
        warnings.warn(
            Notice(
                "the model has running statistics (BatchNorm): they stay on the clients, and the "
                "result has those of the initial model; use GroupNorm (fedlgm.models.to_groupnorm "
                "replaces them)"
            ),
            stacklevel=3,
        )
