"""Gradient inversion, which reconstructs a client's images from its update.

Two attacks work together. If the first layer is linear with a bias and the client has one image,
every row of the update of the layer's weights is a multiple of this image, and division gives the
image exactly (Zhu and Blaschko, 2021, Section 3); with noise the result is only a starting point.
In every other case candidate images are optimised so that local training on them moves the weights
in the observed direction; the loss consists of a cosine similarity and the images' total variation
(Geiping et al., NeurIPS 2020, equation 4). Without noise the cosine is taken over all visible
layers together, and Adam receives only the signs of the gradient, as in that paper. With noise, a
large noisy layer would dominate such a cosine. The loss then has one cosine per layer, weighted by
the layer's share of signal.

    observation = Observation.released(update, plan, keys)
    found = invert(module, observation, training, images=1, shape=(1, 28, 28))
    found.images, found.labels
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedlgm.errors import ConfigError
from fedlgm.training import LocalTraining
from fedlgm_lab.attacks import images as measures
from fedlgm_lab.attacks.analytic import Shape, analytic, infer_labels
from fedlgm_lab.attacks.observation import Observation

OnStep = Callable[[int, int], None]
_UNROLLED = (
    # largest number of simulated local steps; training with more steps is simulated by this number
    # of proportionally longer steps
    10
)


@dataclass(frozen=True)
class InversionSettings:
    """Effort of the attacker.

    Attributes:
        iterations: number of Adam's steps from each start.
        restarts: number of starts. The result is the reconstruction with the least matching loss,
            which separates good starts from bad ones if there is no noise. By default 4 without
            noise, 1 with noise.
        lr: initial learning rate, which falls to zero along a cosine. By default 0.3 without noise,
            0.1 with noise.
        total_variation: weight of the mean absolute difference of neighbouring pixels. By default
            0.005 without noise, 0.02 with noise.
        seed: seed of the starts.

    Raises:
        ConfigError: a number is outside its range.

    Example:
        >>> from fedlgm.planning.layers import LayerTable
        >>> model, quick = nn.Sequential(nn.Flatten(), nn.Linear(4, 2)), InversionSettings(iterations=20, restarts=2)
        >>> update = torch.tensor([0.2, -0.1, 0.0, 0.1, -0.2, 0.1, 0.0, -0.1, 0.3, -0.3])
        >>> seen = Observation.unprotected(LayerTable.from_module(model), update)
        >>> found = invert(model, seen, LocalTraining(), images=2, shape=(1, 2, 2), labels=[0, 1], settings=quick)
        >>> found.method, found.images.shape
        ('optimised', torch.Size([2, 1, 2, 2]))
    """

    iterations: int = 400
    restarts: int | None = None
    lr: float | None = None
    total_variation: float | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        restarts, lr, variation = self.effort(noisy=True)
        if self.iterations < 1 or restarts < 1 or lr <= 0 or variation < 0:
            raise ConfigError(
                "inversion needs iterations and restarts of at least 1, lr > 0 and "
                f"total_variation >= 0, got {self.iterations}, {self.restarts}, {self.lr} and "
                f"{self.total_variation}"
            )

    def effort(self, *, noisy: bool) -> tuple[int, float, float]:
        """Return restarts, lr and total_variation, with the defaults for an update with or without
        noise in place of None.
        """
        restarts, lr, variation = (1, 0.1, 2e-2) if noisy else (4, 0.3, 5e-3)
        return (
            restarts if self.restarts is None else self.restarts,
            lr if self.lr is None else self.lr,
            variation if self.total_variation is None else self.total_variation,
        )


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """The images and labels that an inversion found.

    Attributes:
        images: the reconstructed images, float32 [n, C, H, W] in [-1, 1].
        labels: labels that were inferred or given, int64 [n].
        loss: matching loss of the images, 0 for a perfect match of every layer; NaN for the
            analytic attack.
        method: "analytic" or "optimised".

    Example:
        >>> truth = torch.rand(2, 1, 8, 8) * 2 - 1
        >>> found = Reconstruction(truth.flip(0), torch.tensor([1, 0]), 0.0, "optimised")
        >>> [round(row["ssim"], 3) for row in found.score(truth)]  # whatever the order
        [1.0, 1.0]
    """

    images: Tensor
    labels: Tensor
    loss: float
    method: str

    def score(self, private: Tensor) -> list[dict[str, float]]:
        """Compute each private image's SSIM and PSNR (dB) with the reconstruction that the best
        assignment gives it; the private images are [n, C, H, W].
        """
        guesses, truths = self.images.numpy(), private.numpy()
        order = measures.match(guesses, truths)
        return [
            {"ssim": measures.ssim(guesses[g], truth), "psnr": measures.psnr(guesses[g], truth)}
            for g, truth in zip(order, truths, strict=True)
        ]


def invert(
    module: nn.Module,
    observation: Observation,
    training: LocalTraining,
    *,
    images: int,
    shape: Shape,
    labels: Sequence[int] | None = None,
    settings: InversionSettings | None = None,
    progress: OnStep | None = None,
) -> Reconstruction:
    """Reconstruct the images of the client behind an observation.

    The attacker knows the model from which the client started, the client's local training, the
    number of the client's images and the public noise scales. The attacker knows neither the images
    nor, unless `labels` is given, their labels.

    Args:
        module: a classifier of images with the weights from which the client started; the call does
            not change them.
        observation: what the attacker sees.
        training: the client's local training, with optimizer "sgd". If a client has more images
            than one batch holds, the attacker does not know their order. The attacker therefore
            simulates every step on all images.
        images: number of the client's images.
        shape: shape (C, H, W) of one image.
        labels: labels of the images, if the attacker knows them.
        settings: the attacker's effort.
        progress: called with (iterations done, total iterations).

    Raises:
        ConfigError: the optimizer is not "sgd", there is no image, or the number of labels is not
            `images`.

    Example:
        >>> from fedlgm import data, models
        >>> from fedlgm.planning.layers import LayerTable
        >>> from fedlgm.training import ClientTask, SequentialTrainer
        >>> digits, training = data.load("digits"), LocalTraining(lr=0.1)
        >>> model = models.build("mlp", in_shape=(1, 8, 8), classes=10)
        >>> layers, x = LayerTable.from_module(model), torch.from_numpy(digits.train_x[:1])
        >>> task = ClientTask(x, torch.from_numpy(digits.train_y[:1]), torch.Generator(), 1)
        >>> start = layers.flatten(model)
        >>> trainer = SequentialTrainer(models.build("mlp", in_shape=(1, 8, 8), classes=10), layers, training)
        >>> update = next(iter(trainer.updates(start, [task])))[0]
        >>> found = invert(model, Observation.unprotected(layers, update), training, images=1, shape=(1, 8, 8))
        >>> found.method, found.score(x)[0].get("ssim") > 0.99
        ('analytic', True)
    """
    require_sgd(training)
    if images < 1 or (labels is not None and len(labels) != images):
        raise ConfigError(
            f"inversion needs images >= 1 and as many labels, got {images} and {labels}"
        )
    settings = settings or InversionSettings()
    guessed = (
        infer_labels(module, observation, images, shape)
        if labels is None
        else torch.tensor(list(labels))
    )
    divided = analytic(module, observation, shape) if images == 1 else None
    first, exact = divided or (None, False)
    if first is not None and exact:
        if progress is not None:
            progress(1, 1)
        return Reconstruction(first, guessed, float("nan"), "analytic")
    return _Matching(module, observation, training, guessed, shape, settings).best(first, progress)


def require_sgd(training: LocalTraining) -> None:
    """Refuse local training that the attack cannot simulate, with a ConfigError."""
    if training.optimizer != "sgd":
        raise ConfigError(
            f"inversion simulates local training with optimizer 'sgd', not {training.optimizer!r}: "
            "attack a run with training.optimizer = 'sgd'"
        )
    if training.weight_decay is not None:
        raise ConfigError(
            "inversion simulates local training without training.weight_decay: attack a run "
            "without it"
        )


class _Matching:
    """Optimises images so that simulated local training on them moves the layers as observed."""

    def __init__(
        self,
        module: nn.Module,
        observation: Observation,
        training: LocalTraining,
        labels: Tensor,
        shape: Shape,
        settings: InversionSettings,
    ) -> None:
        self._module, self._labels, self._shape, self._settings = module, labels, shape, settings
        self._training = training
        self._start = {
            slot.name: dict(module.named_parameters())[slot.name]
            .detach()
            .clone()
            .requires_grad_(True)
            for slot in observation.layers.slots()
        }
        share = observation.signal_share
        # If the estimated signal is 0 in every layer, the attack still tries: the estimate may be
        # wrong.
        share = share if share.any() else observation.visible.astype(np.float64)
        parts = observation.layers.split(observation.update)
        seen = [
            (layer.slots, float(weight), part)
            for layer, weight, part in zip(observation.layers.layers, share, parts, strict=True)
            if weight > 0
        ]
        if not seen:
            raise ConfigError("the attacker sees no layer: there is nothing to invert")
        self._clear = not observation.sigma[observation.visible].any()
        if self._clear:
            seen = [
                (
                    tuple(slot for slots, *_ in seen for slot in slots),
                    1.0,
                    torch.cat([part for *_, part in seen]),
                )
            ]
        total = sum(weight for _, weight, _ in seen)
        self._targets = [(slots, weight / total, part) for slots, weight, part in seen]

    def best(self, first: Tensor | None, progress: OnStep | None) -> Reconstruction:
        """Find the reconstruction with the least matching loss over all starts.

        The first start is `first`, or random images if `first` is None. All further starts are
        random images.
        """
        iterations = self._settings.iterations
        restarts, lr, variation = self._settings.effort(noisy=not self._clear)
        best, least = torch.zeros(len(self._labels), *self._shape), np.inf
        for restart in range(restarts):
            generator = torch.Generator().manual_seed(self._settings.seed * 1009 + restart)
            x = 0.1 * torch.randn((len(self._labels), *self._shape), generator=generator)
            x = (first.clone() if first is not None and restart == 0 else x).requires_grad_(True)
            optimizer = torch.optim.Adam([x], lr=lr)
            schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, iterations)
            for step in range(iterations):
                loss = self._loss(x) + variation * _total_variation(x)
                (x.grad,) = torch.autograd.grad(loss, [x])
                x.grad.nan_to_num_()
                if self._clear:
                    x.grad.sign_()
                optimizer.step()
                schedule.step()
                with torch.no_grad():
                    x.clamp_(-1, 1)
                if progress is not None:
                    progress(restart * iterations + step + 1, iterations * restarts)
            reached = float(self._loss(x).detach())
            if reached < least:
                best, least = x.detach().clone(), reached
        return Reconstruction(best, self._labels, least, "optimised")

    def _loss(self, x: Tensor) -> Tensor:
        moved = self._simulate(x)
        loss = torch.zeros(())
        for slots, weight, target in self._targets:
            update = torch.cat([moved[slot.name].reshape(-1) for slot in slots])
            loss = loss + weight * (1 - nn.functional.cosine_similarity(update, target, dim=0))
        return loss

    def _simulate(self, x: Tensor) -> dict[str, Tensor]:
        """Simulate the update of a client that trains on `x`, differentiably in `x`."""
        settings = self._training
        steps = settings.steps(len(x))
        simulated = min(steps, _UNROLLED)
        weights, momenta = dict(self._start), dict.fromkeys(self._start, torch.zeros(()))
        for _ in range(simulated):
            logits = functional_call(self._module, weights, (x,))
            loss = nn.functional.cross_entropy(logits, self._labels)
            gradients = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
            scale = torch.ones(())
            if settings.gradient_clip is not None:
                norm = torch.stack([g.square().sum() for g in gradients]).sum().sqrt()
                scale = (settings.gradient_clip / norm).clamp(max=1.0)
            momenta = {
                n: settings.momentum * momenta[n] + scale * g
                for n, g in zip(weights, gradients, strict=True)
            }
            weights = {
                n: w - settings.lr * steps / simulated * momenta[n] for n, w in weights.items()
            }
        return {n: w - self._start[n] for n, w in weights.items()}


def _total_variation(x: Tensor) -> Tensor:
    vertical, horizontal = x[..., 1:, :] - x[..., :-1, :], x[..., :, 1:] - x[..., :, :-1]
    return vertical.abs().mean() + horizontal.abs().mean()
