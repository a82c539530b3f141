"""Reconstruction of a class with a generative adversarial network, by a curious participant of a
federation.

The released global models serve as the discriminator. A generator learns to make images that these
models assign to a chosen class, of which the attacker holds no images (Hitaj, Ateniese and
Perez-Cruz, CCS 2017). As in the LaDP-FL paper's threat model, the attacker follows the protocol. In
addition, the attacker trains a discriminator that tells its own images from generated images (an
ACGAN, Odena, Olah and Shlens, ICML 2017). The generator makes images of the target class and of the
classes of the attacker's images.

    attack = ClassReconstruction(module, target=3, x=own_x, y=own_y, classes=10)
    for model in released_models:          # [D], one per round
        attack.observe(model)
    images = attack.samples(200)
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import LayerTable
from fedlgm.training.devices import fork_rng


@dataclass(frozen=True)
class GanSettings:
    """Settings of the attacker's training.

    Example:
        >>> GanSettings(steps=5).batch
        64

    Attributes:
        steps: number of the generator's steps for each observed model.
        batch: number of images in one step.
        noise: number of noise values in the generator's input.
        lr: learning rate of Adam.
        realism: weight of the real-or-generated discriminator in the generator's loss.
        seed: seed of the networks' weights and of the generator's inputs.

    Raises:
        ConfigError: a number is outside its range.
    """

    steps: int = 20
    batch: int = 64
    noise: int = 64
    lr: float = 1e-3
    realism: float = 0.3
    seed: int = 0

    def __post_init__(self) -> None:
        if min(self.steps, self.batch, self.noise) < 1 or self.lr <= 0 or self.realism < 0:
            raise ConfigError(
                "the GAN attack needs steps, batch and noise of at least 1, lr > 0 and realism >= 0"
            )


class ClassReconstruction:
    """The attacker's networks, trained on the models that the attacker has seen so far.

    Args:
        module: a classifier of the federation's architecture; its weights are overwritten.
        target: class to reconstruct, which must be absent from `y`.
        x: the images [n, C, H, W] that the attacker holds.
        y: labels [n] of these images.
        classes: number of classes.
        settings: settings of the attacker's training.

    Raises:
        ConfigError: a class is out of range, the attacker holds the target class, or the attacker
            has no images.

    Example:
        >>> x, y = torch.rand(20, 1, 8, 8) * 2 - 1, torch.arange(20) % 2
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(64, 3))
        >>> released, settings = LayerTable.from_module(model).flatten(model), GanSettings(steps=5)
        >>> attack = ClassReconstruction(model, target=2, x=x, y=y, classes=3, settings=settings)
        >>> 0 < attack.observe(released) < 1, attack.samples(4).shape
        (True, torch.Size([4, 1, 8, 8]))
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        target: int,
        x: Tensor,
        y: Tensor,
        classes: int,
        settings: GanSettings | None = None,
    ) -> None:
        if not 0 <= target < classes:
            raise ConfigError(f"the class to reconstruct must lie in [0, {classes}), got {target}")
        if len(y) == 0 or bool((y == target).any()):
            raise ConfigError(
                f"the curious client must hold images, but no image of class {target}: use "
                f"data.partition = 'isolation' with data.private_class = {target}, whose last "
                "client is the curious client"
            )
        self.target, self.settings = target, settings or GanSettings()
        self._x, self._y, self._classes = x, y, classes
        self._module, self._layers = module, LayerTable.from_module(module)
        module.requires_grad_(False)
        self._generator = torch.Generator().manual_seed(self.settings.seed)
        with fork_rng(self.settings.seed):
            self._painter = _generator(self.settings.noise + classes, tuple(x.shape[1:]))
            self._critic = _critic(tuple(x.shape[1:]))
        betas = (0.5, 0.999)
        self._paint = torch.optim.Adam(self._painter.parameters(), lr=self.settings.lr, betas=betas)
        self._judge = torch.optim.Adam(self._critic.parameters(), lr=self.settings.lr, betas=betas)

    def observe(self, model: Tensor) -> float:
        """Learn from one released global model [D]; return the mean probability that this model
        gives the target class on generated images.
        """
        self._layers.load_(self._module, model)
        count = self.settings.batch
        for _ in range(self.settings.steps):
            rows = torch.randint(len(self._y), (count // 2,), generator=self._generator)
            labels = torch.cat([torch.full((count - len(rows),), self.target), self._y[rows]])
            images = self._drawn(labels)
            loss = nn.functional.cross_entropy(self._module(images), labels)
            # the attacker has no real image of the target class
            held = images[labels != self.target]
            self._train_critic(held.detach(), self._x[rows])
            loss = loss + self.settings.realism * nn.functional.softplus(-self._critic(held)).mean()
            if not torch.isfinite(loss):
                break  # with too much noise a model overflows, and nothing can be learned
            self._paint.zero_grad()
            loss.backward()
            self._paint.step()
        with torch.no_grad():
            logits = self._module(self.samples(self.settings.batch))
        return float(torch.softmax(logits, dim=1)[:, self.target].mean())

    @torch.no_grad()
    def samples(self, count: int) -> Tensor:
        """Generate images of the target class, float32 [count, C, H, W] in [-1, 1]; every call
        draws new images.
        """
        labels = torch.full((count,), self.target)
        return torch.cat([self._drawn(part) for part in labels.split(500)])

    def _drawn(self, labels: Tensor) -> Tensor:
        noise = torch.randn((len(labels), self.settings.noise), generator=self._generator)
        images: Tensor = self._painter(
            torch.cat([noise, nn.functional.one_hot(labels, self._classes)], dim=1)
        )
        return images[..., : self._x.shape[-2], : self._x.shape[-1]]

    def _train_critic(self, fakes: Tensor, real: Tensor) -> None:
        loss = (
            nn.functional.softplus(-self._critic(real)).mean()
            + nn.functional.softplus(self._critic(fakes)).mean()
        )
        self._judge.zero_grad()
        loss.backward()
        self._judge.step()


def _generator(noise: int, shape: tuple[int, ...]) -> nn.Module:
    """Build a DCGAN generator of images at least as large as `shape`: a linear layer, two
    transposed convolutions, tanh.
    """
    height, width = (-(-side // 4) for side in shape[1:])
    return nn.Sequential(
        nn.Linear(noise, 64 * height * width),
        nn.Unflatten(1, (64, height, width)),
        nn.BatchNorm2d(64),
        nn.ReLU(),
        nn.ConvTranspose2d(64, 32, 4, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.ConvTranspose2d(32, shape[0], 4, stride=2, padding=1),
        nn.Tanh(),
    )


def _critic(shape: tuple[int, ...]) -> nn.Module:
    """Build a real-or-generated discriminator, which learns positive logits for real images."""
    height, width = (side // 2 // 2 for side in shape[1:])
    return nn.Sequential(
        nn.Conv2d(shape[0], 32, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Conv2d(32, 64, 4, stride=2, padding=1), nn.LeakyReLU(0.2),
        nn.Flatten(), nn.Linear(64 * height * width, 1), nn.Flatten(0),
    )  # fmt: skip
