"""Rows that describe a deployment."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Hello(TypedDict):
    """A node service's statement of its budget, in addition to its name and signature."""

    ok: bool
    epsilon_spent: float
    epsilon: float
    delta: float
    releases_left: int
    test: bool


class NodeStatus(TypedDict):
    """One node as seen from this machine. The figures of its service are None if the service does not answer.

    Attributes:
        name: the node's name.
        service, supernode, executor: whether these processes run on this machine.
        online: whether the SuperLink counts the node as connected; None if its SuperNode has no id so far.
        since: UTC time since which this has been so; None if it has never been connected.
        epsilon_spent, epsilon, delta: spent and allowed over the data set's whole life.
        releases_left: releases that the budget still permits.
        test: whether the noise is known, so that anyone who knows the seed can subtract it.
    """

    name: str
    service: bool
    supernode: bool
    executor: bool
    online: bool | None
    since: str | None
    epsilon_spent: float | None
    epsilon: float | None
    delta: float | None
    releases_left: int | None
    test: bool | None


class RunState(TypedDict):
    """A run of a deployment: name of its folder, finished rounds, and whether all rounds are finished."""

    run: str
    rounds: int
    finished: bool


class DeploymentStatus(TypedDict):
    """Running processes, connected nodes, each node's remaining budget, and the runs."""

    address: str
    superlink: bool
    connected: int
    nodes: list[NodeStatus]
    runs: list[RunState]


class Work(TypedDict):
    """The requested work, by names that are installed on the nodes, with the options of the named objects."""

    mechanism: dict[str, Any]
    group_by: str
    task: dict[str, Any]
    model: dict[str, Any]
    training: dict[str, Any]
    exact_sums: NotRequired[bool]  # of example-level steps; unknown to older services


class NodeRelease(TypedDict):
    """One row of a node's ledger."""

    seq: int
    charged_at: str
    run: str
    round: int
    trust: str
    protects: str
    event: str


class NodeLedgerReport(TypedDict):
    """Releases of a node's data set and its remaining budget.

    Attributes:
        data, ledger, test, head: the data set, the ledger, whether it is for tests, and its head.
        releases, releases_left: releases made, and still permitted.
        epsilon_spent, epsilon, epsilon_left, delta: budget spent, permitted and left.
        unit, relation, trust, guarantee, noise_reproducible: the protection.
        runs: releases by run.
        rows: every release.
    """

    data: str
    ledger: str
    test: bool
    releases: int
    head: str
    epsilon_spent: float
    epsilon: float
    epsilon_left: float
    delta: float
    releases_left: int
    unit: str
    relation: str
    trust: list[str]
    guarantee: str
    noise_reproducible: bool
    runs: dict[str, int]
    rows: list[NodeRelease]
