"""What a deployment says of itself."""

from __future__ import annotations

from typing import Any, NotRequired, TypedDict


class Hello(TypedDict):
    """What a node's service says of its budget, beside what signs and names it."""

    ok: bool
    epsilon_spent: float
    epsilon: float
    delta: float
    releases_left: int
    test: bool


class NodeStatus(TypedDict):
    """One node as seen from this machine; what its service says is None where it does not answer.

    Attributes:
        name: the node's.
        service, supernode, executor: whether these processes run here.
        epsilon_spent, epsilon, delta: spent and allowed over the data set's whole life.
        releases_left: that the budget allows.
        test: whether its noise can be taken off by whoever knows the seed.
    """

    name: str
    service: bool
    supernode: bool
    executor: bool
    epsilon_spent: float | None
    epsilon: float | None
    delta: float | None
    releases_left: int | None
    test: bool | None


class RunState(TypedDict):
    """A run of a deployment: its folder's name, finished rounds, and whether all are."""

    run: str
    rounds: int
    finished: bool


class DeploymentStatus(TypedDict):
    """What runs, who is connected, what each node has left, and the runs."""

    address: str
    superlink: bool
    connected: int
    nodes: list[NodeStatus]
    runs: list[RunState]


class EnrolmentEntry(TypedDict, total=False):
    """Which node is which client, with the digest of its SuperNode's key and its service's public key."""

    client: int
    name: str
    flower_key: str
    service_key: str


class Work(TypedDict):
    """What nodes are asked to do, by names that are installed there; options are the named objects' own."""

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
    event: str


class NodeLedgerReport(TypedDict):
    """What a node's data set has released and what is left.

    Attributes:
        data, ledger, test, head: which data set and ledger, whether it is for tests, and where it stands.
        releases, releases_left: made, and still allowed.
        epsilon_spent, epsilon, epsilon_left, delta: likewise.
        unit, relation, trust, guarantee, noise_reproducible: what protects.
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
