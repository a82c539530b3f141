"""The steps of a client's release: contributions are made and bounded and, if clients add the
noise, noised and charged.

The simulation's client, the Flower mod and a node's service differ only in how contributions are
made (`Contributions`) and in how the client's budget is recorded (`Budget`).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from typing_extensions import override

from fedlgm.aggregation import BoundedSum, sum_on
from fedlgm.aggregation.contributions import Updates
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import local_release
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.guarantee import SharedUnit
from fedlgm.training.devices import Numerics


class Asked(NamedTuple):
    """A server's request to a block of clients.

    Attributes:
        plan: the plan, which sets the bounds and the noise of the contributions.
        model: the global model [D].
        round: number of the round, from 1.
        clients: numbers of the clients, in the order in which their contributions are summed.
    """

    plan: ReleasePlan
    model: Tensor
    round: int
    clients: list[int]


class Keys(NamedTuple):
    """The key rings of a release.

    Attributes:
        order: ring of the random numbers that training draws.
        noise: ring of the noise that clients add; it depends on everything that determines the
            release except the data.
    """

    order: KeyRing
    noise: KeyRing


@dataclass(frozen=True)
class Noised:
    """One client's noised release, which is not yet charged.

    Attributes:
        client: number of the client.
        total: the released values, [plan.size].
        name: name of the release's noise; equal names mean equal noise.
        plan: the plan that the release follows.
    """

    client: int
    total: Tensor
    name: str
    plan: ReleasePlan


Follow = Callable[[Asked, KeyRing], Noised]
"""A function that makes a client's release by the plan of a request, with noise from a key ring."""


class ClientPlanner(Protocol):
    """Interface of objects that make a client's release under local trust by the client's plan."""

    def release(
        self, follow: Follow, update: Updates | None, asked: Asked, noise: KeyRing
    ) -> Noised:
        """Make the client's release.

        Args:
            follow: function that makes the release of this client's update by a given plan.
            update: the client's update [1, D]; None for a client without data.
            asked: the request, with the round's common plan.
            noise: ring of the client's noise.
        """


class Contributions(ABC):
    """Base of classes that make clients' contributions.

    Args:
        numerics: threads, device and noise backend of the computations.

    Attributes:
        of: "user" if each contribution covers all clients of one user (see `Sampling.of`);
            otherwise None.
        answers: the auxiliary queries that clients answer from their data, by name.
    """

    of: SharedUnit | None = None
    answers: frozenset[str] = frozenset()
    planner: ClientPlanner | None = None
    """The object that plans each client's release; None if all releases follow the round's plan."""

    def __init__(self, numerics: Numerics | None = None) -> None:
        self.numerics = numerics or Numerics()

    @abstractmethod
    def updates(self, asked: Asked, order: KeyRing) -> Iterator[tuple[list[int], Updates | None]]:
        """Yield pairs of clients and their updates [b, D], in the order of the request. The updates
        are None for clients that contribute nothing.
        """

    def empty(self, plan: ReleasePlan) -> BoundedSum:
        """A sum without contributions."""
        return BoundedSum.empty(plan)

    @abstractmethod
    def releases(self, asked: Asked, keys: Keys) -> Iterator[Noised]:
        """Yield the release of each client, with the client's noise. Clients without data release
        only noise.
        """


class WholeUpdates(Contributions):
    """Contributions that are bounded when they are summed: the update of a client, or of a user
    over all of the user's clients.
    """

    def empty(self, plan: ReleasePlan) -> BoundedSum:
        """Make a sum without contributions, on the device of the updates."""
        backend = self.numerics.noise_backend
        return sum_on(
            plan, torch.device(self.numerics.device), None if backend == "cpu" else backend
        )

    @override
    def releases(self, asked: Asked, keys: Keys) -> Iterator[Noised]:
        """Yield the release of each client, whose update is bounded before noise is added."""
        for clients, updates in self.updates(asked, keys.order):
            for row, client in enumerate(clients):
                yield self.release(
                    client, None if updates is None else updates[row : row + 1], asked, keys.noise
                )

    def release(self, client: int, update: Updates | None, asked: Asked, noise: KeyRing) -> Noised:
        """Make the release of one client's update [1, D]; `update` is None for a client without an
        update.
        """

        def follow(asked: Asked, noise: KeyRing) -> Noised:
            numerics, plan = self.numerics, asked.plan
            total, name = local_release(
                update, plan, noise, asked.round, client, numerics.noise_backend, numerics.device
            )
            return Noised(client, total, name, plan)

        if self.planner is None:
            return follow(asked, noise)
        return self.planner.release(follow, update, asked, noise)


class Budget(Protocol):
    """Interface of a client's budget. A release is admitted before training, and is charged after
    training under the name of its noise.
    """

    def admit(self, asked: Asked) -> Keys:
        """Return the key rings of a release, or refuse the release before training.

        Raises:
            PrivacyError: the client has not agreed to the plan.
        """

    def charge(self, noised: Noised) -> None:
        """Record a release before it is sent.

        Raises:
            PrivacyError: the release exceeds the agreed budget.
        """


def client_release(contributions: Contributions, budget: Budget, asked: Asked) -> BoundedSum:
    """Sum the contributions of a block of clients, [plan.size].

    If the server adds the noise, the result is the sum without noise. If clients add the noise, the
    result is the sum of their releases, each of which is charged.

    Raises:
        ConfigError, PrivacyError: the clients have not agreed to the plan or cannot carry it out.
    """
    plan, of = asked.plan, asked.plan.facts.sampling.of
    if of != contributions.of:
        wanted, given = (f"{unit or 'client'}s" for unit in (of, contributions.of))
        raise PrivacyError(
            f"the plan is for {wanted}, but these are contributions of {given}: a bound "
            "on one kind of contribution does not bound the other kind"
        )
    for query in (noisy.query for noisy in plan.queries):
        if query.of_data and query.name not in contributions.answers:
            raise ConfigError(
                f"the plan's query {query.name!r} is answered from a client's data, but these "
                "clients have no such answer: choose a mechanism without this query"
            )
    keys = budget.admit(asked)
    if not plan.facts.noised_by.uploads_released:
        block = contributions.empty(plan)
        for clients, updates in contributions.updates(asked, keys.order):
            block.skip(len(clients)) if updates is None else block.add(updates)
        return block
    total = BoundedSum.empty(plan)
    for noised in contributions.releases(asked, keys):
        budget.charge(noised)
        # the server receives only noised values
        total.merge(noised.total.to(total.total), 1, 0)
    return total
