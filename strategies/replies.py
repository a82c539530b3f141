"""Functions that match a round's replies to its messages, order them, and check the replies of
single clients.

The reply of a single client is not trusted. It counts as one contribution if it is within the
plan's bounds. Otherwise it counts as zero and is reported with the node's number. In both cases the
protection of the other clients is unaffected.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from flwr.app import Message

from fedlgm import wire
from fedlgm.errors import FedlgmError, PrivacyError, RunError
from fedlgm.mechanisms.mechanism import PlansFromAnswers
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.upload_caps import upload_caps
from fedlgm.wire import printable

_ROUNDING = 1 + 1e-9
_LONGEST_REASON = 500
_SUPERLINK = 1  # number of the node from which Flower reports that another node is lost


@dataclass(frozen=True)
class Failure:
    """A message of a round to which no usable contribution was returned.

    Attributes:
        kind: "missing" (there is no node, or no reply in time), "error" (the node reports a
            failure) or "rejected" (a reply that breaks a rule).
        node: the node that was asked; None if the client has no node.
        client: the client that was asked.
        reason: description of the failure. It may contain text from the node, so it is made
            printable (see `printable`).

    Example:
        >>> Failure("error", node=7, client=3, reason=chr(27) + "[31mred").reason.isprintable()
        True
    """

    kind: Literal["missing", "error", "rejected"]
    node: int | None
    client: int
    reason: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "reason", printable(self.reason, _LONGEST_REASON))


@dataclass(frozen=True)
class Sent:
    """A message of a round, with the clients that it addresses.

    Attributes:
        message: the message; None if no node could receive it.
        clients: numbers of the addressed clients.

    Example:
        >>> Sent(None, [3]).node is None
        True
    """

    message: Message | None
    clients: list[int]

    @property
    def node(self) -> int | None:
        """The node to which the message was sent; None if there is no message."""
        return None if self.message is None else self.message.metadata.dst_node_id


def in_order(
    sent: Sequence[Sent], replies: Iterable[Message], single: bool, failures: list[Failure]
) -> Iterator[tuple[Sent, Message | None]]:
    """Yield every message with its reply, in the order of the messages and as early as possible.
    For a missing or failed reply, yield None.

    A reply is matched through the message identifier in its metadata, not through its content. It
    must come from the node that was asked and belong to the same run.

    Args:
        sent: the round's messages.
        replies: the replies, in any order.
        single: whether each message is for one client. Failures are then collected; otherwise, with
            the blocks of a simulation, a failure ends the run.
        failures: the list to which failures are appended.

    Raises:
        RunError: a block failed or is missing.

    Example:
        >>> failures = []
        >>> [reply for _, reply in in_order([Sent(None, [3])], [], single=True, failures=failures)]
        [None]
        >>> failures
        [Failure(kind='missing', node=None, client=3, reason='the client has no node')]
    """
    waiting: dict[int, Message | None] = {
        slot: None for slot, request in enumerate(sent) if request.message is None
    }
    for slot in waiting:
        failures.append(Failure("missing", None, sent[slot].clients[0], "the client has no node"))
    slots: dict[str, int] = {}
    turn = 0
    for reply in replies:
        slots = slots or {
            request.message.metadata.message_id: i
            for i, request in enumerate(sent)
            if request.message is not None
        }
        slot = slots.get(reply.metadata.reply_to_message_id, -1)
        problem = _mismatch(reply, sent, slot, taken=slot in waiting or slot < turn)
        if not single and (problem or reply.has_error()):
            raise RunError(f"a client block failed: {problem or reply.error.reason}")
        if problem:
            client = sent[slot].clients[0] if slot >= 0 else -1
            failures.append(Failure("rejected", reply.metadata.src_node_id, client, problem))
        elif reply.has_error():
            failures.append(
                Failure("error", sent[slot].node, sent[slot].clients[0], str(reply.error.reason))
            )
            waiting[slot] = None
        else:
            waiting[slot] = reply
        while turn in waiting:
            yield sent[turn], waiting.pop(turn)
            turn += 1
    missing = [slot for slot in range(turn, len(sent)) if slot not in waiting]
    if missing and not single:
        raise RunError(
            f"only {len(sent) - len(missing)} of {len(sent)} messages of the round were answered"
        )
    for slot in range(turn, len(sent)):
        if slot in missing:
            failures.append(
                Failure("missing", sent[slot].node, sent[slot].clients[0], "no reply in time")
            )
        yield sent[slot], waiting.get(slot)


def _mismatch(reply: Message, sent: Sequence[Sent], slot: int, taken: bool) -> str | None:
    if slot < 0:
        return "it does not answer a message of this round"
    if taken:
        return "the message was answered before"
    asked = sent[slot].message
    assert asked is not None
    if reply.metadata.run_id != asked.metadata.run_id:
        return "it belongs to another run"
    # The report that a node is lost comes from Flower's SuperLink, under the SuperLink's number.
    allowed = {asked.metadata.dst_node_id, *((_SUPERLINK,) if reply.has_error() else ())}
    if reply.metadata.src_node_id not in allowed:
        return f"node {asked.metadata.dst_node_id} was asked"
    return None


def block_sum(reply: Message, plan: ReleasePlan) -> np.ndarray:
    """Read the sum [plan.size] that a worker of a simulation returned. Only its shape and type are
    checked.

    Raises:
        PrivacyError: the sum does not have the plan's size or type.
        RunError: the array cannot be read.
    """
    values = wire.view(reply.content.array_records[wire.ARRAYS][wire.SUM].data)
    if values.shape != (plan.size,) or values.dtype not in (np.float32, np.float64):
        raise PrivacyError(
            f"a reply holds {values.size} values of type {values.dtype} and shape {values.shape}, "
            f"but the plan releases {plan.size} numbers"
        )
    return values


def contribution(reply: Message, plan: ReleasePlan) -> np.ndarray:
    """Read a single client's contribution [plan.size] as float64, and check that it is within the
    plan's bounds.

    Under central trust the norm of every part must not exceed the part's bound. Under local trust
    the norm must not exceed a limit that a bounded part plus its noise exceeds with probability at
    most 1e-15. If the client bounds the gradients of its examples, the norm must not exceed a
    public cap (`fedlgm.planning.upload_caps`). The metrics of the reply are ignored.

    Raises:
        PrivacyError: the contribution exceeds the bounds; the message says how.
    """
    return check_bounds(_numbers(reply, plan), plan)


def own_contribution(reply: Message, plan: ReleasePlan, mechanism: PlansFromAnswers) -> np.ndarray:
    """Do the same as `contribution` for a client that plans its layers from its own answer to a
    query.

    The reply contains the noisy answer. The server makes the same plan from this answer, and
    requires the client's layers to be within the bounds of this plan.

    Raises:
        PrivacyError: the answer or a layer exceeds its bound, or a layer that the answer does not
            select is not zero.
    """
    values, size, count = _numbers(reply, plan), plan.layers.size, len(plan.indices)
    start = size
    for part, limit in zip(plan.parts[count:], _limits(plan)[count:], strict=True):
        _check_norm(values[start : start + part.size], part.name, limit)
        start += part.size
    own = mechanism.plan_from_answer(plan, values[size:])
    layers = plan.layers.split(torch.from_numpy(values[:size]))
    for name, layer, released in zip(plan.layers.names, layers, own.released, strict=True):
        if not released and bool(layer.any()):
            raise PrivacyError(
                f"it sends values of layer {name!r}, which its answer does not select"
            )
    check_bounds(torch.cat([layers[j] for j in own.indices]).numpy(), own)
    return values


def _numbers(reply: Message, plan: ReleasePlan) -> np.ndarray:
    """Read the numbers [plan.size] in a client's reply as float64.

    Raises:
        PrivacyError: the reply cannot be read.
    """
    try:
        return block_sum(reply, plan).astype(np.float64)
    except FedlgmError as error:
        raise PrivacyError(str(error)) from error
    except Exception as error:  # a hostile message can make the parser raise any exception
        raise PrivacyError(f"the reply cannot be read: {type(error).__name__}: {error}") from error


def check_bounds(values: np.ndarray, plan: ReleasePlan) -> np.ndarray:
    """Check that one client's numbers [plan.size] are within the plan's bounds (see
    `contribution`), and return them as float64.

    Raises:
        PrivacyError: the numbers exceed the bounds; the message says how.
    """
    values = values.astype(np.float64)
    if not np.isfinite(values).all():
        raise PrivacyError("it holds NaN or infinite values")
    order, start = 1 if plan.family == "laplace" and plan.bounded_by != "trainer" else 2, 0
    for part, limit in zip(plan.parts, _limits(plan), strict=True):
        _check_norm(values[start : start + part.size], part.name, limit, order)
        start += part.size
    return values


def _check_norm(values: np.ndarray, name: str, limit: float, order: int = 2) -> None:
    norm = _norm(values, order)
    if not norm <= limit * _ROUNDING:
        raise PrivacyError(
            f"its part {name!r} has norm {norm:.4g}, but the plan allows {limit:.4g}"
        )


def _limits(plan: ReleasePlan) -> list[float]:
    """Compute the largest allowed norm of each part of one client's contribution."""
    if plan.bounded_by == "trainer":
        return [float(cap) for cap in upload_caps(plan)]
    return [plan.facts.noised_by.limit(part, plan.family) for part in plan.parts]


def _norm(values: np.ndarray, order: int) -> float:
    with np.errstate(over="ignore", under="ignore"):
        norm = float(np.linalg.norm(values, ord=order))
        if 1e-100 < norm < math.inf:
            return norm
        # squares of huge numbers overflow, and squares of tiny numbers underflow to zero
        largest = float(np.abs(values).max(initial=0.0))
        return largest * float(np.linalg.norm(values / largest, ord=order)) if largest else 0.0
