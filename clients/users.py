"""Contributions of users. A user is a person with several clients, such as several devices.

>>> from clients import ClientData
>>> from fedlgm import Guarantee, LayerTable, ReleasePlan, RunFacts, Sampling
>>> from fedlgm.training import SequentialTrainer
>>> from torch import nn
>>> model, settings = nn.Linear(1, 2), LocalTraining()
>>> layers = LayerTable.from_module(model)
>>> def source(client):
...     return ClientData(torch.ones(client, 1), torch.zeros(client, dtype=torch.int64))
>>> work = UserWork(SequentialTrainer(model, layers, settings), settings, source, users=((0,), (1, 3), (2,)))
>>> facts = RunFacts(1.0, Sampling("poisson", 3, 1.0, of="user"))
>>> plan = ReleasePlan(layers, [1.0], [1.0], facts, Guarantee("proven", "an example"))
>>> plan.protects
'user, add-remove'
>>> asked = Asked(plan, layers.flatten(model), 1, [1, 0])
>>> contributions = UserUpdates(ClientUpdates(work), work.users)
>>> made = contributions.updates(asked, KeyRing.from_seed(1))
>>> [(users, None if updates is None else len(updates)) for users, updates in made]
[([1], 1), ([0], None)]
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from typing_extensions import override

from clients.updates import ClientUpdates, LocalWork
from fedlgm.aggregation.client_release import Asked, Contributions, WholeUpdates
from fedlgm.aggregation.contributions import Updates, raw_updates
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.facts import LocalTraining  # noqa: F401  (the docstring)
from fedlgm.training.devices import Numerics

Users = Sequence[Sequence[int]]
"""The clients of each user, where the user's number is the index. Rounds draw numbers of users."""


class UserUpdates(WholeUpdates):
    """One contribution per user: the mean of the updates of the user's clients that have data.

    This mean is bounded before it is added to the sum, so all clients of a user together change the
    sum by at most the plan's bounds. Sampling draws users: either all clients of a user take part
    in a round or none.

    **Sensitivity.** Let u be a user, C_u the clients of u, and m_u(w) the mean over c in C_u with
    data of the update of c from the model w. It is a function only of the data of u, of w and of
    u's random numbers. A round sums clip_s(m_u(w)) over the drawn users, with ||clip_s(x)_j|| <=
    s_j in every layer j. Data sets that differ in one user may differ in the number of the user's
    clients and in all of their data. Their sums differ only in clip_s(m_u(w)), that is, by at most
    s_j in layer j under add-or-remove-one and zero-out, and by 2 s_j under replace-one. This is the
    premise of the theorem for clients, with users instead of clients: Poisson draws of users are
    independent of each other and of the data, and w depends only on earlier releases.

    Bounding each client at s_j and sampling clients, as for `privacy.unit = "client"`, would not
    suffice: a user with k clients in a round moves the sum by up to k s_j.

    Args:
        clients: computes the updates of the single clients.
        users: the clients of each user. No client may belong to two users, because its data would
            then move two contributions.

    Raises:
        ConfigError: a client belongs to two users.
    """

    of = "user"

    def __init__(
        self, clients: Contributions, users: Users, numerics: Numerics | None = None
    ) -> None:
        super().__init__(numerics)
        members = [client for user in users for client in user]
        if len(set(members)) < len(members):
            raise ConfigError("users: a client belongs to two users, or twice to one")
        self._clients, self._users = clients, users

    @override
    def updates(self, asked: Asked, order: KeyRing) -> Iterator[tuple[list[int], Updates | None]]:
        """Yield the mean update of each user in `asked.clients`, which are numbers of users; None
        for a user without data.
        """
        members = [client for user in asked.clients for client in self._users[user]]
        rows = self._rows(asked._replace(clients=members), order)
        for user in asked.clients:
            batch = [row for row in (next(rows) for _ in self._users[user]) if row is not None]
            yield [user], torch.stack(batch).mean(dim=0, keepdim=True) if batch else None

    def _rows(self, asked: Asked, order: KeyRing) -> Iterator[Tensor | None]:
        """Yield each client's update [D], in order. The updates are copies, because a block of
        updates may be overwritten when the next block is computed.
        """
        for clients, updates in self._clients.updates(asked, order):
            yield from [None] * len(clients) if updates is None else raw_updates(updates).clone()


@dataclass(frozen=True, kw_only=True)
class UserWork(LocalWork):
    """Training and data of clients that belong to users.

    Attributes:
        users: the clients of each user.
    """

    users: Users

    @override
    def contributions(self, numerics: Numerics | None = None) -> Contributions:
        return UserUpdates(ClientUpdates(self, numerics), self.users, numerics)
