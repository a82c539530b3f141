"""Rules for recipes with privacy.unit = "client", the sampled unit of their runs, and the clients'
training.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import override

from clients import ClientSource, LocalWork
from clients.cut_vote import CutVotes, VotingWork
from fedlgm.aggregation.contributions import raw_updates
from fedlgm.errors import ConfigError
from fedlgm.extension.operations import own_vmap_rule
from fedlgm.extension.separation import shared_state
from fedlgm.extension.trial import Examples, try_clients
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning import run_rules
from fedlgm.planning.facts import LocalSteps, Sampling
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.guarantee import Relation
from fedlgm.training import ClientTask
from fedlgm.training.inputs import Inputs
from fedlgm.training.tasks import Task
from fedlgm.wording import prefix_key
from simulations.config.unit import ModelParts, Settings, UnitKind

_OPTIONAL = ("bands", "buffers")
_ALONE = (
    "conditional on a client's training not depending on clients that the same process has "
    "trained before (tested on public examples)"
)
_KEYS = {
    "relation": "privacy.relation",
    "trust": "privacy.trust",
    "sampling": "federation.sampling",
    "cap": "privacy.max_participations",
}


def _options(noise: str) -> tuple[str, ...]:
    """Options of a kind of correlated noise."""
    if noise in ("independent", "given"):
        return ()
    from fedlgm.noise.correlation import options_of  # SciPy's optimisers

    with prefix_key("privacy.noise"):
        return options_of(noise)


def _kinds_with(option: str) -> str:
    """The kinds of correlated noise that have an option, as a message lists them."""
    from fedlgm.noise.correlation import names

    return " or ".join(repr(name) for name in names() if option in _options(name))


class ClientLevel(UnitKind):
    """The unit is all of a client's data. The sum bounds each client's update."""

    verb, flat = "bounds whole clients", "gaussian"

    @override
    def check(self, recipe: Settings) -> None:
        federation, privacy, local = (
            recipe.federation,
            recipe.privacy,
            recipe.noised_by.uploads_released,
        )
        scheme = federation.sampling
        noise = "" if privacy.noise == "independent" else f"privacy.noise = {privacy.noise!r}"
        capped = privacy.max_participations is not None
        settings = run_rules.Settings(
            scheme, federation.share, recipe.relation, recipe.noised_by, noise, capped=capped
        )
        run_rules.check(settings, _KEYS)
        if scheme == "allocation" and recipe.run.audit:
            raise ConfigError(
                "run.audit: canaries are not allocated to rounds: leave it out with "
                "federation.sampling = 'allocation'"
            )
        if privacy.noise == "given" and privacy.correlation is None:
            raise ConfigError(
                "privacy.noise = 'given' needs privacy.correlation: pass simulate(noise=a "
                "Correlation)"
            )
        for key in _OPTIONAL:
            if getattr(privacy, key) is not None and key not in _options(privacy.noise):
                raise ConfigError(
                    f"privacy.{key} is for privacy.noise = {_kinds_with(key)}: leave it out here"
                )
        if scheme not in run_rules.TURNS:
            self._check_separation(recipe)
        elif privacy.min_separation is not None:
            raise ConfigError(
                f"privacy.min_separation: {scheme!r} sampling lets a client take part in any "
                "round: set federation.sampling to 'cyclic', 'min-separation' or 'grouped-poisson'"
            )
        if local and privacy.max_participations is None:
            raise ConfigError(
                f"privacy.max_participations is needed under {privacy.trust} trust, because every "
                "participation costs privacy"
            )
        delta, count, unit = privacy.delta, recipe.sampling.population, recipe.unit
        if delta >= 1 / count and recipe.mechanism.name != "none":
            warnings.warn(
                f"privacy.delta = {delta:g} is not below 1/{count}, one over the number of "
                f"{unit}s: such a guarantee permits the full publication of one {unit}'s data",
                stacklevel=4,
            )

    def _check_separation(self, recipe: Settings) -> None:
        privacy, rounds = recipe.privacy, recipe.federation.rounds
        if (
            recipe.federation.sampling == "grouped-poisson"
            and privacy.min_separation is None
            and privacy.bands is None
        ):
            raise ConfigError(
                "federation.sampling = 'grouped-poisson' needs privacy.bands or "
                "privacy.min_separation, the number of groups"
            )
        with prefix_key("federation"):
            separation = recipe.sampling.separation
        for name, most in (
            ("federation.rounds", rounds),
            ("the rounds between participations", separation),
        ):
            if privacy.bands is not None and most is not None and privacy.bands > most:
                raise ConfigError(f"privacy.bands = {privacy.bands} is more than {name}, {most}")

    @override
    def relation(self, recipe: Settings) -> Relation:
        if recipe.federation.sampling == "min-separation":
            return "zero-out"
        return "replace-one" if recipe.federation.sampling == "fixed" else recipe.noised_by.relation

    def sampling_and_steps(
        self, recipe: Settings, examples: int
    ) -> tuple[Sampling, LocalSteps | None]:
        """See `UnitKind.sampling_and_steps`; the unit is a client."""
        return recipe.sampling, None

    @override
    def work(self, model: ModelParts, source: ClientSource) -> LocalWork:
        recipe, trainer = model.recipe, model.trainer()

        def votes() -> CutVotes:
            return CutVotes(model.module(), model.layers, model.data.task)

        return VotingWork(
            trainer, recipe.training.local, source, recipe.federation.stragglers, votes=votes
        )

    def conditions(self, model: ModelParts) -> tuple[str, ...]:
        """See `UnitKind.conditions`. There is one more condition if a user's parts could carry
        state between clients.
        """
        training, task, kind = model.recipe.training, model.data.task, model.trainer_kind
        why: str | None = None
        if training.kernel == "native":  # its clients run no code of a user
            pass
        elif training.vectorize != "on":
            why = shared_state(model.module(), task, kind.sequential)
        elif kind.vectorized is not None:
            why = kind.together or shared_state(model.module(), task, kind.vectorized)
            rule = own_vmap_rule(model=model.module(), task=task, trainer=kind.vectorized)
            if why is None and rule is not None:
                why = f"{rule} has its own rule for vmap, which could join clients"
        return (*super().conditions(model), *([] if why is None else [f"{_ALONE}: {why}"]))

    @override
    def try_training(
        self, model: ModelParts, task: Task, x: Inputs, y: Tensor, owner: type
    ) -> None:
        module = model.module()

        def updates(clients: Sequence[Examples]) -> list[Tensor]:
            trainer = model.trainer(compiled=False)
            alike = [ClientTask(x, y, torch.Generator(), 1) for x, y in clients]
            results = trainer.updates(model.layers.flatten(module), alike)
            return list(torch.cat([raw_updates(update).clone() for update in results]))

        try_clients(module, updates, task, x, y, owner)

    @override
    def try_kernel(
        self, model: ModelParts, x: Inputs, y: Tensor, first_plan: Callable[[], ReleasePlan]
    ) -> None:
        order = KeyRing.from_seed(0).torch_generator(Purpose.PROBE, 0)
        task = ClientTask(x, y, order, 1, first_plan().trained)
        trainer = model.native(torch.device("cpu"))
        for update in trainer.updates(model.initial(), [task]):
            raw_updates(update)
