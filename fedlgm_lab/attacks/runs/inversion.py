"""`fedlgm attack inversion`: reconstructs images of single clients from their updates under several
protections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor, nn

from fedlgm.aggregation.contributions import raw_updates
from fedlgm.errors import ConfigError
from fedlgm.mechanisms.mechanism import PlansFromAnswers
from fedlgm.mechanisms.private_plans import UsesPrivateNorms, UsesPrivateUpdates
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.training import ClientTask
from fedlgm_lab.attacks.inversion import InversionSettings, Reconstruction, invert, require_sgd
from fedlgm_lab.attacks.observation import Observation
from fedlgm_lab.attacks.runs.target import Images, Target
from simulations.config.assembly import Assembly
from simulations.config.overrides import override
from simulations.config.recipe import Recipe
from simulations.progress import OnProgress

UNPROTECTED = "no noise"
_STEPS = 1000  # steps of the progress bar for one inversion


@dataclass(frozen=True)
class Protection:
    """The protection under which an update reaches the attacker.

    Attributes:
        label: label in tables and pictures.
        recipe: the recipe whose mechanism bounds the update and adds noise; None for the raw
            update.
    """

    label: str
    recipe: Recipe | None


@dataclass(frozen=True, eq=False)
class Victim:
    """A client and its private images.

    Attributes:
        client: number of the client.
        x: images [n, C, H, W].
        y: labels [n].
        update: raw update [D].
    """

    client: int
    x: Tensor
    y: Tensor
    update: Tensor


@dataclass(frozen=True, eq=False)
class Finding:
    """An inversion of one victim under one protection.

    Attributes:
        protection: label of the protection.
        victim: the victim.
        found: the reconstruction.
        scores: SSIM and PSNR of every private image.
        observation: the attacker's view.
        seen: the only layer that the attacker saw; None if the attacker saw all released layers.
    """

    protection: str
    victim: Victim
    found: Reconstruction
    scores: list[dict[str, float]]
    observation: Observation
    seen: str | None = None

    def to_dict(self) -> dict[str, Any]:
        """Convert the finding to values that JSON can hold, without the images."""
        return {
            "protection": self.protection,
            "client": self.victim.client,
            "layer": self.seen,
            "method": self.found.method,
            "ssim": float(np.mean([score["ssim"] for score in self.scores])),
            "psnr": float(np.mean([score["psnr"] for score in self.scores])),
            "labels_found": int((self.found.labels == self.victim.y.sort().values).sum()),
            "images": len(self.victim.y),
        }


def protections(
    recipe: Recipe, epsilons: Sequence[float], published: bool = False
) -> list[Protection]:
    """List the protections: no protection, the recipe's mechanism at each budget, and on request
    its published variant.

    Args:
        recipe: the attacked recipe.
        epsilons: budgets of the complete run; the recipe's budget if empty.
        published: whether to add the mechanism's published variant.

    Raises:
        ConfigError: the mechanism has no noise, or no published variant.
    """
    selection = [Protection(UNPROTECTED, None)]
    if recipe.unit != "client":
        raise ConfigError(
            "inversion attacks a client's whole bounded and noised update, but the recipe protects "
            f"{recipe.unit}s (privacy.unit)"
        )
    if recipe.mechanism.name == "none":
        if epsilons:
            raise ConfigError("--epsilon: mechanism 'none' has no noise that a budget would set")
        return selection
    for epsilon in epsilons or (recipe.privacy.epsilon,):
        label = f"{recipe.mechanism.name}, {recipe.mechanism.variant}, epsilon {epsilon:g}"
        selection.append(Protection(label, _with_values(recipe, "privacy", epsilon=epsilon)))
    if published and recipe.mechanism.variant != "published":
        label = f"{recipe.mechanism.name}, published, epsilon {recipe.privacy.epsilon:g}"
        selection.append(Protection(label, _with_values(recipe, "mechanism", variant="published")))
    return selection


def victims(target: Target, count: int, images: int) -> tuple[Assembly, nn.Module, list[Victim]]:
    """Choose clients that hold at least `images` images, reduce them to this number of images, and
    compute their raw updates.

    A recipe is attacked in its first round. A finished run is attacked in the round that would
    follow its last round.

    Returns:
        The federation's objects, the model from which the clients start, and the victims.

    Raises:
        ConfigError: no client holds this many images.
    """
    if count < 1 or images < 1:
        raise ConfigError(f"--victims and --images must be at least 1, got {count} and {images}")
    assembly = target.assembly(reconstructs=True)
    module = assembly.model.module()
    if target.folder is not None:
        target.folder.checkpoints.into(module, assembly.model.layers)
    model, keys = assembly.model.layers.flatten(module), target.keys("inversion")
    trainer = assembly.model.trainer(False, False)
    people = []
    for client in np.flatnonzero(assembly.data.sizes >= images)[:count]:
        rows = assembly.data.partition[int(client)][:images]
        x, y = (part[rows] for part in Images.of(assembly.data.dataset).train)
        task = ClientTask(
            x,
            y,
            keys.torch_generator(Purpose.TRAIN, 1, int(client)),
            assembly.recipe.training.epochs,
        )
        people.append(
            Victim(
                int(client),
                x,
                y,
                raw_updates(next(iter(trainer.updates(model, [task]))))[0].clone(),
            )
        )
    if not people:
        raise ConfigError(
            f"no client holds {images} images: the largest holds {int(assembly.data.sizes.max())}; ask "
            "for fewer --images"
        )
    return assembly, module.eval(), people


def observe(
    protection: Protection, victim: Victim, layers: LayerTable, start: Tensor, keys: KeyRing
) -> Observation:
    """Compute what the attacker sees of the victim's update under a protection.

    Args:
        protection: protection of the update.
        victim: owner of the update.
        layers: the model's layers, for an unprotected update.
        start: the model from which the victim started [D].
        keys: keys of the noise, which is drawn separately for every protection and victim.
    """
    if protection.recipe is None:
        return Observation.unprotected(layers, victim.update)
    assembly = Assembly(protection.recipe)
    noise_keys = keys.derive(protection.label.encode(), str(victim.client).encode())
    return Observation.released(
        victim.update, client_plan(assembly, victim.update, start), noise_keys
    )


def client_plan(assembly: Assembly, update: Tensor, start: Tensor) -> ReleasePlan:
    """Make the plan by which a client bounds its update and adds noise. Published variants make the
    plan from this update.

    Raises:
        ConfigError: the mechanism's clients make two releases in a round.
    """
    mechanism, layers, facts = (
        assembly.model.mechanism,
        assembly.model.layers,
        assembly.privacy.facts,
    )
    if isinstance(mechanism, PlansFromAnswers):
        raise ConfigError(
            f"{mechanism.name}: its clients make two releases in a round and plan the second "
            "from the first, which this attack does not repeat: attack 'uniform' under local trust"
        )
    if isinstance(mechanism, UsesPrivateNorms):
        return mechanism.plan_from_private_norms(layers, facts, layers.norms(update).numpy()[None])
    plan = assembly.privacy.method.plan(Transcript.start(start))
    if isinstance(mechanism, UsesPrivateUpdates):
        return mechanism.plan_from_private_update(plan, update, start)[0]
    return plan


def attack(
    target: Target,
    *,
    count: int = 3,
    images: int = 1,
    epsilons: Sequence[float] = (),
    published: bool = False,
    per_layer: bool = False,
    settings: InversionSettings | None = None,
    progress: OnProgress | None = None,
) -> list[Finding]:
    """Invert the updates of several clients under every protection.

    Args:
        target: the attacked recipe or run.
        count: number of victims.
        images: number of images of each victim.
        epsilons: budgets of the mechanism; see `protections`.
        published: see `protections`.
        per_layer: whether to invert also each single layer of the victims' protected updates.
        settings: the attacker's effort.
        progress: called with (steps done, total, description).
    """
    settings = settings or InversionSettings()
    require_sgd(target.recipe.training.local)
    chosen = protections(target.recipe, epsilons, published)
    assembly, module, people = victims(target, count, images)
    start, shape = assembly.model.layers.flatten(module), assembly.data.dataset.shape
    keys = target.keys("inversion noise")
    seen: list[tuple[str, Victim, Observation, str | None]] = []
    for protection in chosen:
        for victim in people:
            observation = observe(protection, victim, assembly.model.layers, start, keys)
            seen.append((protection.label, victim, observation, None))
            if per_layer:
                names = np.array(observation.layers.names)[observation.visible]
                seen += [
                    (protection.label, victim, observation.only([name]), str(name))
                    for name in names
                ]
    findings = []
    for number, (label, victim, observation, layer) in enumerate(seen):

        def on_step(done: int, total: int, number: int = number, label: str = label) -> None:
            if progress is not None:
                progress(number * _STEPS + done * _STEPS // total, len(seen) * _STEPS, label)

        # The last bias reveals the labels. An attacker that sees only one layer is given the
        # labels.
        labels = victim.y.sort().values.tolist() if layer is not None else None
        reconstruction = invert(
            module,
            observation,
            assembly.recipe.training.local,
            images=len(victim.y),
            shape=shape,
            labels=labels,
            settings=settings,
            progress=on_step,
        )
        findings.append(
            Finding(
                label, victim, reconstruction, reconstruction.score(victim.x), observation, layer
            )
        )
    return findings


def _with_values(recipe: Recipe, section: str, **values: Any) -> Recipe:
    """Change values in a section of a recipe, and validate the recipe again."""
    raw = recipe.plain_values()
    override(raw, {f"{section}.{key}": value for key, value in values.items()})
    return Recipe.model_validate(raw)
