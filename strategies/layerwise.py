"""FedAvg with layer-wise differential privacy.

One round: sample clients -> plan -> blocks travel to nodes -> bounded sums come back and are added in a fixed order ->
charge the ledger -> noise -> divide by the public denominator -> server step -> the new model joins the transcript.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Message, MessageType, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg
from torch import Tensor

from fedlgm import wire
from fedlgm.aggregation.kernels import widest
from fedlgm.clipping import BoundedSum
from fedlgm.devices import torch_threads
from fedlgm.errors import PrivacyError, RunError
from fedlgm.keys import KeyRing
from fedlgm.layers import LayerTable
from fedlgm.mechanisms import Mechanism
from fedlgm.noise import NoiseBackend
from fedlgm.plan import Budget, ReleasePlan
from fedlgm.privacy.ledger import Ledger
from fedlgm.release import SERVER, add_downlink_, fingerprint, release
from fedlgm.transcript import Transcript
from strategies.cohort import CohortSampler, blocks
from strategies.server_optimizer import ServerStep

# Sums are read where their messages lie, and only read.
warnings.filterwarnings("ignore", "The given NumPy array is not writable", UserWarning)


@dataclass
class RoundRecord:
    """What a finished round looked like; everything here is public or marked as a diagnostic.

    Attributes:
        round: number, from 1.
        plan: what was released.
        cohort: clients drawn (secret in a deployment: amplification needs it).
        present: clients that took part: drawn, not dropped out, and asked for something.
        discarded: contributions with NaN or Inf that counted as zero (diagnostic; not noised).
        seconds: wall time of the round without evaluation.
        notes: figures that published, NOT PRIVATE variants report, each [clients, K].
    """

    round: int
    plan: ReleasePlan
    cohort: int
    present: int
    discarded: int
    seconds: float
    notes: dict[str, np.ndarray] = field(default_factory=dict)


@dataclass
class _Pending:
    """The round in flight."""

    round: int
    plan: ReleasePlan
    blocks: list[np.ndarray]
    started: float
    cohort: int
    single: bool
    notes: dict[str, list[np.ndarray]] = field(default_factory=dict)


class LayerwiseFedAvg(FedAvg):
    """Flower strategy that releases exactly what a mechanism plans.

    Args:
        mechanism: source of each round's plan.
        layers: `mechanism.table(...)` of the model's layers.
        budget: what one round may spend.
        transcript: state to start from; `transcript.rounds` rounds are already done.
        sampler: cohorts.
        optimizer: server step.
        keys: secret ring of the server's noise.
        ledger: charged before each release.
        block_size: clients whose bounded updates are added up before they join the sum. Part of the result's bits.
        work: expected effort of each client (simulations only), see `blocks`.
        max_participations: under local trust, releases a client may make in total; clients at the cap are not drawn.
        on_round: called with each finished round and the new transcript.
        wait_for_nodes: seconds to wait until nodes connect.
        threads: torch threads while a plan is made; sums over a layer depend on it.
        device: where the sum lies while noise is drawn for it.
        noise_backend: who draws the noise, see `fedlgm.release`.
    """

    def __init__(
        self,
        mechanism: Mechanism,
        layers: LayerTable,
        budget: Budget,
        transcript: Transcript,
        sampler: CohortSampler,
        optimizer: ServerStep,
        keys: KeyRing,
        ledger: Ledger,
        *,
        block_size: int = 8,
        work: np.ndarray | None = None,
        max_participations: int | None = None,
        on_round: Callable[[RoundRecord, Transcript], None] | None = None,
        wait_for_nodes: float = 120.0,
        threads: int = 1,
        device: torch.device | str = "cpu",
        noise_backend: NoiseBackend = "cpu",
    ) -> None:
        super().__init__(fraction_evaluate=0.0, arrayrecord_key=wire.ARRAYS, configrecord_key=wire.CONFIG)
        if layers.size != transcript.models[-1].numel():
            raise ValueError("the transcript's model does not fit the layer table")
        self.mechanism, self.layers, self.budget, self.transcript = mechanism, layers, budget, transcript
        self.sampler, self.optimizer, self.keys, self.ledger = sampler, optimizer, keys, ledger
        self.block_size, self.work = block_size, work
        self.max_participations, self.on_round = max_participations, on_round
        self.wait_for_nodes, self.threads = wait_for_nodes, threads
        self.device, self.noise_backend = torch.device(device), noise_backend
        self._pending: _Pending | None = None
        self._nodes: dict[int, int] | list[int] | None = None

    def summary(self) -> None:
        """Flower prints this; the run's own report says more."""

    def initial_arrays(self) -> ArrayRecord:
        """The current global model as Flower's `Strategy.start` wants it."""
        return _record(self.transcript.models[-1])

    def configure_train(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """Draw the cohort, make the plan and address its blocks."""
        started = time.perf_counter()
        round_ = self.transcript.rounds + 1  # Flower counts from 1 also when a run is resumed
        drawn = self.sampler.cohort(round_, self._exhausted(round_))
        cut = blocks(self.sampler.present(round_, drawn), self.block_size, self.work)
        nodes = self._discover(grid)
        plan = self._plan(round_, cut, arrays, grid, nodes)
        if plan.budget.trust == "local" and self._costs(plan):
            for client in (int(c) for block in cut for c in block):
                # The clients release as soon as they are asked.
                self.ledger.charge(
                    plan.event,
                    round=round_,
                    client=client,
                    key=fingerprint(self.keys, round_, client, self.noise_backend),
                    claim=plan.claim,
                )
        if plan.size == 0:
            cut = []  # nothing is released: no client is asked
        single = isinstance(nodes, dict)
        self._pending = _Pending(round_, plan, cut, started, len(drawn), single)
        extra = {wire.PLAN: plan.to_json()}
        return self._messages(grid, nodes, cut, round_, arrays, MessageType.TRAIN, extra)

    def aggregate_train(self, server_round: int, replies: Iterable[Message]) -> tuple[ArrayRecord, MetricRecord]:
        """Add up, charge, noise, divide by the public denominator and step."""
        pending, self._pending = self._pending, None
        if pending is None:
            raise RunError("aggregate_train was called without configure_train")
        plan, trust = pending.plan, pending.plan.budget.trust
        total = self._sum(pending, replies)
        values = total.total.to(self.device, widest(self.device))
        if trust == "central" and self._costs(plan):
            key = fingerprint(self.keys, pending.round, SERVER, self.noise_backend)
            self.ledger.charge(plan.event, round=pending.round, key=key, claim=plan.claim)
        if trust == "central":
            release(values, plan, self.keys, pending.round, backend=self.noise_backend)
        mean = add_downlink_(values.div_(plan.denominator), plan, self.keys, pending.round, self.noise_backend)
        mean = mean.cpu().float()
        model = self.optimizer.step(self.transcript.models[-1], self._expand(mean, plan))
        self.transcript = self.transcript.extend(model, mean, plan)
        discarded = int(total.discarded)
        record = RoundRecord(
            pending.round,
            plan,
            pending.cohort,
            sum(len(block) for block in pending.blocks),
            discarded,
            time.perf_counter() - pending.started,
            {name: np.concatenate(rows) for name, rows in pending.notes.items()},
        )
        if self.on_round is not None:
            self.on_round(record, self.transcript)
        return _record(model), MetricRecord({"cohort": pending.cohort, "discarded": discarded})

    def configure_evaluate(
        self, server_round: int, arrays: ArrayRecord, config: ConfigRecord, grid: Grid
    ) -> Iterable[Message]:
        """No federated evaluation: unprotected figures of private data would be one more release."""
        return []

    def aggregate_evaluate(self, server_round: int, replies: Iterable[Message]) -> None:
        """Nothing to aggregate, see `configure_evaluate`."""
        return None

    # -- planning ------------------------------------------------------------------------------------------------------

    def _plan(
        self, round_: int, cut: list[np.ndarray], arrays: ArrayRecord, grid: Grid, nodes: dict[int, int] | list[int]
    ) -> ReleasePlan:
        if not self.mechanism.needs_private_norms:
            with torch_threads(self.threads):
                return self.mechanism.plan(self.layers, self.budget, self.transcript)
        messages = self._messages(grid, nodes, cut, round_, arrays, wire.TRAIN_NORMS, {})
        rows = [
            wire.view(m.content.array_records[wire.ARRAYS][wire.NORMS].data)
            for m in self._in_order(grid.send_and_receive(messages), len(messages))
        ]
        norms = np.concatenate(rows) if rows else np.ones((1, len(self.layers)))
        return self.mechanism.plan_from_private_norms(self.layers, self.budget, norms)

    def _costs(self, plan: ReleasePlan) -> bool:
        """Whether the round is charged: not if nothing is released and nothing ever was, see `ReleasePlan.event`."""
        return plan.size > 0 or self.ledger.rounds() > 0

    def _exhausted(self, round_: int) -> frozenset[int]:
        """Clients at their cap before `round_`."""
        if self.max_participations is None:
            return frozenset()
        counts = self.ledger.participations()
        for later, client, key in self.ledger.since(round_):
            # A resumed run repeats this release bit by bit: it is on the ledger, but not yet in the past.
            counts[client] -= key == fingerprint(self.keys, later, client, self.noise_backend)
        return frozenset(client for client, count in counts.items() if count >= self.max_participations)

    # -- messages ------------------------------------------------------------------------------------------------------

    def _discover(self, grid: Grid) -> dict[int, int] | list[int]:
        """Client -> node where every client has a node of its own; else the nodes, any of which serves any client."""
        if self._nodes is not None:
            return self._nodes
        population, deadline = self.budget.sampling.population, time.monotonic() + self.wait_for_nodes
        answers: dict[int, ConfigRecord] = {}
        while self._nodes is None:
            answers |= self._ask(grid, [node for node in grid.get_node_ids() if node not in answers])
            sizes = {int(a[wire.PARTITIONS]) for a in answers.values()}  # type: ignore[arg-type]
            if answers and sizes != {population}:
                self._nodes = sorted(answers)
                break
            owner = {int(a[wire.PARTITION]): node for node, a in answers.items()}  # type: ignore[arg-type]
            missing = sorted(set(range(population)) - owner.keys())
            if not missing:
                self._nodes = owner
            elif time.monotonic() > deadline:
                if not answers:
                    raise RunError(f"no node connected within {self.wait_for_nodes:.0f} s")
                raise RunError(
                    f"{len(missing)} of {population} clients have no node after {self.wait_for_nodes:.0f} s, the first "
                    f"is {missing[0]}"
                )
            else:
                time.sleep(0.1)
        return self._nodes

    def _ask(self, grid: Grid, nodes: list[int]) -> dict[int, ConfigRecord]:
        """What each node says of the client that lives there."""
        content = RecordDict({wire.CONFIG: ConfigRecord()})
        queries = [grid.create_message(content, MessageType.QUERY, node, "query") for node in nodes]
        answers = {}
        for reply in grid.send_and_receive(queries, timeout=self.wait_for_nodes) if queries else ():
            if reply.has_error():
                raise RunError(f"node {reply.metadata.src_node_id} did not start: {reply.error.reason}")
            answers[reply.metadata.src_node_id] = reply.content.config_records[wire.CONFIG]
        return answers

    def _messages(
        self,
        grid: Grid,
        nodes: dict[int, int] | list[int],
        cut: list[np.ndarray],
        round_: int,
        arrays: ArrayRecord,
        kind: str,
        extra: dict[str, str],
    ) -> list[Message]:
        """A message a block where a node serves any client; a message a client where each has its own node."""
        addressed: list[tuple[int, list[int]]] = []
        if isinstance(nodes, dict):
            addressed = [(nodes[int(c)], [int(c)]) for block in cut for c in block]
        else:
            addressed = [(nodes[i % len(nodes)], block.tolist()) for i, block in enumerate(cut)]
        messages = []
        for index, (node, members) in enumerate(addressed):
            values: dict[str, Any] = {wire.ROUND: round_, wire.BLOCK: index, wire.CLIENTS: members, **extra}
            content = RecordDict({wire.ARRAYS: arrays, wire.CONFIG: ConfigRecord(values)})
            messages.append(grid.create_message(content, kind, node, str(round_)))
        return messages

    def _in_order(self, replies: Iterable[Message], expected: int) -> Iterator[Message]:
        """Replies by message index as soon as their turn comes, whatever order they arrive in."""
        waiting: dict[int, Message] = {}
        turn = 0
        for reply in replies:
            if reply.has_error():
                raise RunError(f"a client block failed: {reply.error.reason}")
            waiting[int(reply.content.metric_records[wire.METRICS][wire.BLOCK])] = reply  # type: ignore[arg-type]
            while turn in waiting:
                yield waiting.pop(turn)
                turn += 1
        if turn != expected:
            raise RunError(f"only {turn + len(waiting)} of {expected} messages of the round were answered")

    def _sum(self, pending: _Pending, replies: Iterable[Message]) -> BoundedSum:
        """Sum of the blocks in order; blocks that arrive client by client are put together first."""
        total = BoundedSum.empty(pending.plan)
        block = BoundedSum.empty(pending.plan) if pending.single else total
        sizes = [len(b) for b in pending.blocks]
        left = iter(sizes)
        room = next(left, 0)
        for reply in self._in_order(replies, sum(sizes) if pending.single else len(sizes)):
            metrics = reply.content.metric_records[wire.METRICS]
            arrays = reply.content.array_records[wire.ARRAYS]
            values = wire.view(arrays[wire.SUM].data)
            for name in (key for key in arrays if key.startswith(wire.NOTE)):
                pending.notes.setdefault(name.removeprefix(wire.NOTE), []).append(arrays[name].numpy())
            count, discarded = int(metrics[wire.EXAMPLES]), int(metrics[wire.DISCARDED])  # type: ignore[arg-type]
            if values.shape != (pending.plan.size,) or values.dtype not in (np.float32, np.float64):
                raise PrivacyError(
                    f"a reply holds {values.size} values of {values.dtype} as {values.shape} where the plan releases "
                    f"{pending.plan.size} numbers"
                )
            block.merge(torch.from_numpy(values), count, discarded)
            if pending.single and block.count >= room:
                total.merge(block.total, block.count, block.discarded)
                block, room = BoundedSum.empty(pending.plan), next(left, 0)
        return total

    def _expand(self, mean: Tensor, plan: ReleasePlan) -> Tensor:
        """The released layers' mean at their places in a flat update [D]; 0 for layers that were not released."""
        if plan.released.all():
            return mean[: self.layers.size]
        update = torch.zeros(self.layers.size)
        views = self.layers.split(update)
        for j, part in zip(plan.indices, mean.split([size for _, size, _, _ in plan.parts]), strict=False):
            views[j].copy_(part)
        return update


def _record(model: Tensor) -> ArrayRecord:
    return ArrayRecord({wire.MODEL: Array(**wire.fields(model.numpy()))})
