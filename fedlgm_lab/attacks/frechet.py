"""Frechet distance between sets of images, in the features of a small classifier that is trained on
public data.

The usual Frechet Inception Distance needs the weights of an Inception network and uses 2,048
features, which are too many for a few hundred small grey images. This module applies the same
formula to the last hidden layer of a classifier that it trains on public images of the same kind.
Two distances are comparable only if they come from the same classifier and the same numbers of
images. They are never comparable with an Inception distance.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.training.devices import fork_rng

FEATURES = 32
_LEAST = 2  # least number of images from which a covariance can be estimated


def frechet_distance(first: np.ndarray, second: np.ndarray) -> float:
    """Compute the squared 2-Wasserstein distance between normal laws fitted to two sets of
    features.

    The distance is ||m1 - m2||^2 + Tr(S1 + S2 - 2 (S1 S2)^(1/2)), with means m and covariances S
    (Heusel et al., NeurIPS 2017).

    Args:
        first: features of n images, [n, d].
        second: features of m images, [m, d].

    Raises:
        ConfigError: the features differ in width, or a set has fewer than two images.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> sample = rng.standard_normal((500, 3))
        >>> round(frechet_distance(sample, sample + 2.0), 6)
        12.0
    """
    a, b = np.asarray(first, dtype=np.float64), np.asarray(second, dtype=np.float64)
    if a.ndim != 2 or b.ndim != 2 or a.shape[1] != b.shape[1] or min(len(a), len(b)) < _LEAST:
        raise ConfigError(
            f"a Frechet distance needs two sets of features [n, d] with the same width d, each of at "
            f"least {_LEAST} images; got {a.shape} and {b.shape}"
        )
    cov_a, cov_b = (
        np.cov(a, rowvar=False, ddof=1).reshape(a.shape[1], -1),
        np.cov(b, rowvar=False, ddof=1),
    )
    cov_b = cov_b.reshape(b.shape[1], -1)
    values, vectors = np.linalg.eigh(cov_a)
    root = (vectors * np.sqrt(np.clip(values, 0, None))) @ vectors.T
    # The trace of (S1 S2)^(1/2) equals the trace of the symmetric (S1^(1/2) S2 S1^(1/2))^(1/2).
    cross = np.sqrt(np.clip(np.linalg.eigvalsh(root @ cov_b @ root), 0, None)).sum()
    distance = float(
        ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(cov_a) + np.trace(cov_b) - 2 * cross
    )
    return max(distance, 0.0)


@dataclass(frozen=True, eq=False)
class PublicClassifier:
    """A classifier of public images, in whose last hidden layer distances between sets of images
    are measured.

    Attributes:
        body: network that maps images [n, C, H, W] to features [n, 32].
        head: network that maps features to logits.
        accuracy: share of the held-out images that the classifier classifies correctly.

    Example:
        >>> x = torch.cat([torch.full((20, 1, 8, 8), -0.5), torch.full((20, 1, 8, 8), 0.5)])
        >>> judge = PublicClassifier.train(x, torch.arange(40) // 20, classes=2)
        >>> judge.accuracy, judge.distance(x, x) < 1e-6 < judge.distance(x[:20], x[20:])
        (1.0, True)
    """

    body: nn.Module
    head: nn.Module
    accuracy: float

    @classmethod
    def train(cls, x: Tensor, y: Tensor, classes: int) -> PublicClassifier:
        """Train on public images, of which every fifth is held out to measure the accuracy.

        The call does not change the state of torch's global random generators.

        Args:
            x: images [n, C, H, W] of at least 8x8 pixels; the attacked federation must not train on
                them.
            y: labels [n].
            classes: number of classes.

        Raises:
            ConfigError: there are fewer than ten images, images are below 8x8 pixels, or the number
                of labels differs from the number of images.
        """
        if min(x.shape[-2:]) < 8 or len(x) < 10 or len(x) != len(y):
            raise ConfigError(
                "a public classifier needs at least 10 images of at least 8x8 pixels and as many "
                f"labels, got {tuple(x.shape)} and {len(y)} labels"
            )
        with fork_rng(0):
            body = nn.Sequential(
                nn.Conv2d(x.shape[1], 16, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(16, 32, 3, padding=1), nn.ReLU(), nn.AdaptiveAvgPool2d(4), nn.Flatten(),
                nn.Linear(512, FEATURES), nn.ReLU(),
            )  # fmt: skip
            head = nn.Linear(FEATURES, classes)
            held_out = torch.arange(len(y)) % 5 == 4
            own_x, own_y = x[~held_out], y[~held_out]
            optimizer = torch.optim.Adam([*body.parameters(), *head.parameters()], lr=2e-3)
            for _ in range(15):
                for rows in torch.randperm(len(own_y)).split(64):
                    optimizer.zero_grad()
                    nn.functional.cross_entropy(head(body(own_x[rows])), own_y[rows]).backward()
                    optimizer.step()
        trained = cls(body.eval(), head.eval(), float("nan"))
        return cls(body, head, trained.agreement(x[held_out], y[held_out]))

    @torch.no_grad()
    def features(self, x: Tensor) -> np.ndarray:
        """Compute the features of images [n, C, H, W], float64 [n, 32]."""
        return torch.cat([self.body(part) for part in x.split(1000)]).double().numpy()

    @torch.no_grad()
    def agreement(self, x: Tensor, y: Tensor | int) -> float:
        """Measure the share of images [n, C, H, W] that are classified as `y`, [n] or one class."""
        predicted = torch.cat([self.head(self.body(part)).argmax(dim=1) for part in x.split(1000)])
        return float((predicted == torch.as_tensor(y)).float().mean())

    def distance(self, first: Tensor, second: Tensor) -> float:
        """Compute the Frechet distance between two sets of images [n, C, H, W] and [m, C, H, W]."""
        return frechet_distance(self.features(first), self.features(second))
