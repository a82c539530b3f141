"""FedAvg with layer-wise differential privacy.

In one round, the strategy samples clients, makes the plan of the release and sends messages to the
nodes. The nodes return sums of bounded updates, which the strategy adds in a fixed order. The
strategy then charges the ledger, adds the noise, divides by the public denominator, takes a step of
the server's optimizer and appends the new model to the transcript.
"""

from __future__ import annotations

import secrets
import time
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, ClassVar

import numpy as np
import torch
from flwr.app import (
    Array,
    ArrayRecord,
    ConfigRecord,
    Message,
    MessageType,
    MetricRecord,
    RecordDict,
)
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from fedlgm import wire
from fedlgm.aggregation import BoundedSum
from fedlgm.errors import ConfigError, DivergedError, Notice, PrivacyError, RunError
from fedlgm.mechanisms.mechanism import PlansFromAnswers
from fedlgm.mechanisms.method import Method
from fedlgm.mechanisms.private_plans import UsesPrivateNorms
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training.devices import torch_threads
from strategies.cohort import CohortSampler, blocks, require_once
from strategies.messages import message_to
from strategies.nodes import Nodes
from strategies.releaser import Releaser
from strategies.replies import (
    Failure,
    Sent,
    block_sum,
    contribution,
    in_order,
    own_contribution,
)
from strategies.server_optimizer import ServerStep, require_finite

# Sums are read from the memory of their messages without a copy, and are never changed.
warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)


_SHOWN = 10  # number of clients that a notice names
_LARGEST = 3  # number of contributions that a notice names after divergence


@dataclass
class RoundRecord:
    """Record of a finished round. The plan is public; only the server may know the other
    attributes.

    `LayerwiseFedAvg` creates a record at the end of every round and passes it to `on_round`.

    Attributes:
        round: number of the round, from 1.
        plan: plan of the release.
        cohort: number of clients that were drawn. It stays secret in a deployment, because
            amplification by sampling requires a secret cohort.
        present: number of drawn clients that did not drop out; 0 if the round releases nothing.
        discarded: number of contributions with NaN or infinity, which counted as zero. No noise is
            added to this number.
        seconds: wall time of the round without evaluation.
        failures: the contributions that are missing, failed or were rejected. Each of them counted
            as zero.
        notes: for `PublishedFedAvg`, arrays [clients, K] of figures of the clients, by name.
        exhausted: clients that were not invited because they have spent their budget (local trust).
    """

    round: int
    plan: ReleasePlan
    cohort: int
    present: int
    discarded: int
    seconds: float
    failures: tuple[Failure, ...] = ()
    notes: dict[str, np.ndarray] = field(default_factory=dict)
    exhausted: tuple[int, ...] = ()


@dataclass
class Pending:
    """A round whose messages are sent and whose replies are not yet aggregated."""

    round: int
    plan: ReleasePlan
    blocks: list[np.ndarray]
    sent: list[Sent]
    started: float
    cohort: int
    exhausted: tuple[int, ...] = ()
    failures: list[Failure] = field(default_factory=list)
    notes: dict[str, list[np.ndarray]] = field(default_factory=dict)
    # norm of each client's contribution, if every client has its own node
    norms: dict[int, float] = field(default_factory=dict)


class LayerwiseFedAvg(FedAvg):
    """Flower strategy that publishes only the releases that a mechanism plans.

    `PrivateFedAvg` builds such a strategy from a model and a budget; docs/how-to/flower-app.md
    shows how to run it. There is no example here, because a round needs clients on a grid.

    Args:
        method: mechanism, layers and facts of the run.
        transcript: the models and plans so far; the run continues after `transcript.rounds` rounds.
        sampler: draws the cohorts.
        optimizer: the server's optimizer.
        releaser: adds the noise to the server's releases and charges them to the ledger.
        nodes: assigns nodes to clients.
        on_round: called with each finished round and the new transcript.
        continue_ledger: whether the ledger may contain rounds that are not in `transcript`; the
            costs of all rounds then add up.

    Raises:
        ConfigError: the seed is public although the nodes are real, the run's accounting does not
            cover the cohorts, or the mechanism needs another strategy class.
        LedgerError: the ledger contains rounds that are not in `transcript`, and `continue_ledger`
            is not set.
        ValueError: the transcript's model has another size than the layer table.
    """

    plans_from_private_data: ClassVar[bool] = False
    """Whether rounds are planned from private data, which only `strategies.published_strategy` does."""

    def __init__(
        self,
        method: Method,
        transcript: Transcript,
        sampler: CohortSampler,
        optimizer: ServerStep,
        releaser: Releaser,
        nodes: Nodes,
        *,
        on_round: Callable[[RoundRecord, Transcript], None] | None = None,
        continue_ledger: bool = False,
    ) -> None:
        super().__init__(arrayrecord_key=wire.ARRAYS, configrecord_key=wire.CONFIG)
        # Clients do not evaluate. The two attributes are set here and not through Flower's
        # constructor, because that would warn users although the setting is intended.
        self.fraction_evaluate, self.min_evaluate_nodes = 0.0, 0
        if method.layers.size != transcript.models[-1].numel():
            raise ValueError("the transcript's model does not fit the layer table")
        method.check_cohorts(sampler.sampling)
        if isinstance(method.mechanism, UsesPrivateNorms) and not self.plans_from_private_data:
            raise ConfigError(
                f"{method.mechanism.name}: strategies.strategy_class names the strategy of this "
                "mechanism"
            )
        if not (nodes.simulated or nodes.test_mode) and not (
            releaser.keys.secret and sampler.keys.secret
        ):
            raise ConfigError(
                "run.seed: a server of real nodes refuses a public seed, with which noise and "
                "cohorts could be drawn again: leave it out (--set run.seed=none), or set "
                "run.test_mode=true to try it without protection"
            )
        self.method, self.transcript = method, transcript
        self.sampler, self.optimizer, self.releaser, self.nodes = (
            sampler,
            optimizer,
            releaser,
            nodes,
        )
        self.on_round = on_round
        if not continue_ledger:
            method.require_rounds(releaser.ledger, transcript, sampled=releaser.draws_anew)
        self._pending: Pending | None = None
        self._configured = 0
        self._said: frozenset[int] = frozenset()

    def summary(self) -> None:
        """Print nothing, because the run's report contains more."""

    def initial_arrays(self) -> ArrayRecord:
        """Return the current global model in the form that Flower's `Strategy.start` takes."""
        return _record(self.transcript.models[-1])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort, make the plan and return the messages to the nodes."""
        started = time.perf_counter()
        facts = self.method.facts
        round_ = self.transcript.rounds + 1  # Flower counts from 1 also when a run is resumed
        if round_ == self._configured and not self.nodes.repeats:
            # This is a second attempt at the round. Nodes that answered the first attempt make
            # another release, so they are charged again.
            self.releaser = replace(self.releaser, attempt=secrets.token_bytes(16))
        self._configured = round_
        # If clients add noise to their own steps, each client has the whole budget of the recipe,
        # even if the recipe sets no limit of participations.
        cap = facts.max_participations if facts.steps is None else facts.releases
        exhausted = self.releaser.clients_at_cap(round_, cap)
        self._say_exhausted(exhausted)
        drawn = self.sampler.cohort(round_, exhausted)
        present = self.sampler.present(round_, drawn)
        require_once(present, self.sampler.sampling.population)
        cut = blocks(present, self.releaser.numerics.block_size, self.nodes.work)
        self.nodes.find(grid, self.sampler.sampling.population)
        plan = self._plan(round_, cut, arrays, grid)
        clients = [int(client) for block in cut for client in block]
        charge = partial(self.releaser.charge_clients, plan, round_, clients)
        if plan.size == 0:
            charge()
            cut = []  # no client is asked, so nothing is released
        else:
            self.nodes.charge(grid, charge)
        # `config` is what the caller of `start` sends to the clients
        extra = {**config, wire.PLAN: plan.to_json()}
        sent = self._messages(grid, cut, round_, arrays, MessageType.TRAIN, extra)
        self._pending = Pending(
            round_, plan, cut, sent, started, len(drawn), tuple(sorted(exhausted))
        )
        return [request.message for request in sent if request.message is not None]

    def aggregate_train(
        self, server_round: int, replies: Iterable[Message]
    ) -> tuple[ArrayRecord, MetricRecord]:
        """Add up the contributions, charge the release, add its noise, divide by the public
        denominator and take a step of the server's optimizer.

        Raises:
            RunError: `configure_train` was not called before, a block of a simulation failed, or
                too few nodes answered.
            LedgerError: the release cannot be charged.
            DivergedError: the step of the server's optimizer gave NaN or infinity; `transcript`
                then still ends with the previous round.
        """
        pending, self._pending = self._pending, None
        if pending is None:
            raise RunError("aggregate_train was called without configure_train")
        plan = pending.plan
        total = self._sum(pending, replies)
        self._check_quorum(pending)
        mean = self.releaser.mean(total, plan, pending.round)
        model = self.optimizer.step(self.transcript.models[-1], plan.expand(mean))
        try:
            require_finite(model, pending.round)
        except DivergedError as error:
            error.largest = tuple(
                sorted(pending.norms.items(), key=lambda pair: -pair[1])[:_LARGEST]
            )
            if error.largest:
                said = ", ".join(f"client {client} ({norm:.3g})" for client, norm in error.largest)
                warnings.warn(
                    Notice(f"norms of the largest contributions of round {pending.round}: {said}"),
                    stacklevel=2,
                )
            raise
        self.transcript = self.transcript.extend(model, mean, plan)
        record = RoundRecord(
            pending.round,
            plan,
            pending.cohort,
            sum(len(block) for block in pending.blocks),
            int(total.discarded),
            time.perf_counter() - pending.started,
            tuple(pending.failures),
            {name: np.concatenate(rows) for name, rows in pending.notes.items()},
            pending.exhausted,
        )
        if self.on_round is not None:
            self.on_round(record, self.transcript)
        return _record(model), MetricRecord({"round": pending.round})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Return no messages: there is no federated evaluation, because metrics of private data
        without noise would be an unprotected release.
        """
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Aggregate nothing (see `configure_evaluate`)."""
        return None

    def _say_exhausted(self, exhausted: frozenset[int]) -> None:
        """Warn the operator of the clients whose budget has been exhausted since the last call.
        Reports omit these clients, because only the operator may know who took part.
        """
        new, self._said = sorted(exhausted - self._said), self._said | exhausted
        if new:
            shown = ", ".join(map(str, new[:_SHOWN])) + (", ..." if len(new) > _SHOWN else "")
            who = f"client {shown} is" if len(new) == 1 else f"clients {shown} are"
            said = f"{who} not invited again: the budget of a client allows no further release"
            warnings.warn(Notice(said), stacklevel=3)

    def _plan(
        self, round_: int, cut: list[np.ndarray], arrays: ArrayRecord, grid: Grid
    ) -> ReleasePlan:
        """Make the round's plan from released values alone."""
        with torch_threads(self.releaser.numerics.threads):
            return self.method.plan(self.transcript)

    def _read_more(self, reply: Message, clients: int, pending: Pending) -> None:
        """Ignore everything except the sum in a node's reply, because a run publishes only values
        that are bounded and noised. Subclasses may read more.
        """

    def _messages(
        self,
        grid: Grid,
        cut: list[np.ndarray],
        round_: int,
        arrays: ArrayRecord,
        kind: str,
        extra: dict[str, Any],
    ) -> list[Sent]:
        """Make one message per block if every node serves any client, or one message per client if
        each client has its own node. A client without a node gets an entry without a message.
        """
        sent = []
        for node, members in self.nodes.addresses(cut):
            message = None
            if node is not None:
                values: dict[str, Any] = {**extra, wire.ROUND: round_, wire.CLIENTS: members}
                content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: ConfigRecord(values)})
                message = message_to(grid, content, kind, node, str(round_))
            sent.append(Sent(message, members))
        return sent

    def _sum(self, pending: Pending, replies: Iterable[Message]) -> BoundedSum:
        """Add the sums of the blocks in their order. If each client has its own node, the
        contributions are first added up within their blocks.
        """
        single, plan = self.nodes.single, pending.plan
        total = BoundedSum.empty(plan)
        block = BoundedSum.empty(plan) if single else total
        ends = set(np.cumsum([len(b) for b in pending.blocks]).tolist())
        for number, (request, reply) in enumerate(
            in_order(pending.sent, replies, single, pending.failures), start=1
        ):
            if single:
                self._add_client(block, request, reply, pending)
                if number in ends:
                    total.merge(block.total, block.count, block.discarded)
                    block = BoundedSum.empty(plan)
                continue
            assert reply is not None
            metrics = reply.content.metric_records[wire.METRICS]
            total.merge(
                torch.from_numpy(block_sum(reply, plan)),
                int(metrics[wire.CLIENT_COUNT]),  # type: ignore[arg-type]
                int(metrics[wire.DISCARDED]),  # type: ignore[arg-type]
            )
            self._read_more(reply, len(request.clients), pending)
        return total

    def _add_client(
        self, block: BoundedSum, request: Sent, reply: Message | None, pending: Pending
    ) -> None:
        """Add one client's contribution to the block if the contribution is within the plan's
        bounds. Any other contribution counts as zero and is recorded as a failure.
        """
        if reply is not None:
            try:
                values = self._contribution(reply, pending.plan)
                self._read_more(reply, 1, pending)
                block.merge(torch.from_numpy(values), 1, 0)
                pending.norms[request.clients[0]] = float(np.linalg.norm(values))
            except PrivacyError as error:
                pending.failures.append(
                    Failure("rejected", request.node, request.clients[0], str(error))
                )

    def _contribution(self, reply: Message, plan: ReleasePlan) -> np.ndarray:
        """Return the values of one client's reply after checking them against the bounds of the
        plan that the client follows.
        """
        mechanism = self.method.mechanism
        if isinstance(mechanism, PlansFromAnswers):
            return own_contribution(reply, plan, mechanism)
        return contribution(reply, plan)

    def _check_quorum(self, pending: Pending) -> None:
        """End the run, before anything is charged, if too few nodes answered.

        Raises:
            RunError: no node answered, fewer nodes answered than the quorum requires, or more nodes
                failed than allowed.
        """
        nodes, asked, answered = self.nodes, len(pending.sent), len(pending.norms)
        if not nodes.single or answered == asked:
            return
        first = pending.failures[0]
        told = f"{answered} of {asked} nodes answered in round {pending.round}; node {first.node}: {first.reason}"
        if answered == 0:
            raise RunError(f"no node answered: {told}")
        if nodes.quorum is not None and answered < nodes.quorum * asked:
            raise RunError(
                f"fewer than federation.quorum = {nodes.quorum:g} of the nodes answered: {told}"
            )
        if nodes.max_failures is not None and asked - answered > nodes.max_failures:
            raise RunError(
                f"more than federation.max_failures = {nodes.max_failures} nodes failed: {told}"
            )


def _record(model: Tensor) -> ArrayRecord:
    return ArrayRecord({wire.MODEL: Array(**wire.fields(model.numpy()))})
