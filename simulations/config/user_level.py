"""Rules for recipes with privacy.unit = "user", where a user is a person with several clients."""

from __future__ import annotations

import numpy as np
from typing_extensions import override

from clients import ClientSource, LocalWork
from clients.users import UserWork
from fedlgm.data import Partition
from fedlgm.errors import ConfigError
from fedlgm.planning.facts import RunFacts, Sampling
from simulations.config.client_level import ClientLevel
from simulations.config.unit import ModelParts, Settings


class UserLevel(ClientLevel):
    """The unit is all clients of one user. Rounds draw users, and the mean update of a user's
    clients is bounded.

    `clients.users.UserUpdates` has the proof. Participants of the sampling are users, so every rule
    for clients holds for them.
    """

    verb = "bounds whole users"
    of = "user"
    keys = ("federation.users",)

    @override
    def check(self, recipe: Settings) -> None:
        if recipe.federation.users is None:
            raise ConfigError(
                f"privacy.unit = {self.of!r} needs federation.users: the {self.of} of each client, "
                f"or the number of {self.of}s"
            )
        if recipe.noised_by.uploads_released:
            raise ConfigError(
                f"privacy.unit = {self.of!r} needs privacy.trust = 'central': a client that "
                f"noises its own update does not see the updates of its {self.of}'s other clients"
            )
        if recipe.mechanism.variant != "sound":
            raise ConfigError(
                f"privacy.unit = {self.of!r} is for variant = 'sound': a published variant plans "
                "from clients"
            )
        if recipe.run.audit:
            raise ConfigError(
                "run.audit: canaries stand for clients: leave it out with privacy.unit = "
                f"{self.of!r}"
            )
        super().check(recipe)

    def division(self, recipe: Settings) -> str:
        """See `UnitKind.division`; it combines the division among the clients with the clients of
        each user.
        """
        return f"{super().division(recipe)} {recipe.federation.members}"

    @override
    def work(self, model: ModelParts, source: ClientSource) -> LocalWork:
        client_work, users = super().work(model, source), model.recipe.federation.members
        return UserWork(
            client_work.trainer,
            client_work.settings,
            client_work.source,
            client_work.straggler_rate,
            users=users,
        )

    def efforts(self, recipe: Settings, sizes: np.ndarray) -> np.ndarray:
        """See `UnitKind.efforts`: the examples of all clients of a user."""
        return np.array([sizes[list(clients)].sum() for clients in recipe.federation.members])

    @override
    def examples(self, recipe: Settings, partition: Partition) -> list[np.ndarray]:
        return [
            np.concatenate([partition[client] for client in clients])
            for clients in recipe.federation.members
        ]

    @override
    def check_nodes(self, allocated: bool = False) -> None:
        raise ConfigError(
            f"privacy.unit = {self.of!r} is for simulations: a {self.of}'s updates are averaged "
            "before they are bounded, and a real node sees only its own update. Where one node "
            f"holds all data of a {self.of}, use privacy.unit = 'client'"
        )

    @override
    def words(self, cohorts: Sampling, facts: RunFacts) -> str:
        return (
            super()
            .words(cohorts, facts)
            .replace(" clients,", f" {self.of}s with all their clients,")
        )
