"""`fedlgm attack gan`: a curious client reconstructs the class that it does not hold."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Message
from flwr.clientapp import ClientApp
from torch import Tensor
from typing_extensions import override

from fedlgm import wire
from fedlgm.data.class_names import class_number
from fedlgm.errors import ConfigError, RunError
from fedlgm_lab.attacks.frechet import PublicClassifier
from fedlgm_lab.attacks.gan import ClassReconstruction, GanSettings
from fedlgm_lab.attacks.inception import InceptionFeatures
from fedlgm_lab.attacks.runs.target import FIGURES, Images, Target, in_usual_pixels, train
from simulations.engines.local import LocalGrid
from simulations.progress import OnProgress
from simulations.runs.rows import FullRow, RunSummary, excerpt


@dataclass(frozen=True, eq=False)
class ClassFinding:
    """Success of the reconstruction of one class.

    Attributes:
        target: the class.
        distance: Frechet distance of reconstructions and private images of the class, in the
            features of a classifier trained on the test set, which the federation does not train
            on; comparable only under the same classifier.
        floor: distance between two halves of the private images. A perfect reconstruction would
            have this distance.
        nearest_class: smallest distance between the private images and the images of another class.
            A reconstruction with a larger distance is no better than images of this other class.
        agreement: share of reconstructions that the public classifier assigns to the class.
        classifier_accuracy: accuracy of this classifier on held-out public images.
        images: number of reconstructions, which equals the number of private images of the class.
        samples: reconstructions [n, C, H, W].
        private: private images of the class [n, C, H, W].
        result: summary of the attacked run.
        inception_distance: Frechet Inception distance of reconstructions and private images; None
            if not requested.
        inception_floor: Inception distance between two halves of the private images.
    """

    target: int
    distance: float
    floor: float
    nearest_class: float
    agreement: float
    classifier_accuracy: float
    images: int
    samples: Tensor
    private: Tensor
    result: RunSummary
    inception_distance: float | None = None
    inception_floor: float | None = None

    def to_dict(self) -> dict[str, Any]:
        """Convert to values that JSON can hold, with the run's figures and without images."""
        fields = {
            name: value
            for name, value in vars(self).items()
            if name not in ("samples", "private", "result")
        }
        return fields | excerpt(FIGURES, self.result)


class _Watched(LocalGrid):
    """Shows every round's global model to the attacker before the clients train."""

    def __init__(self, client_app: ClientApp, on_model: Callable[[Tensor], object]) -> None:
        super().__init__(client_app)
        self._on_model, self._round = on_model, 0

    @override
    def deliver(self, messages: list[Message]) -> Iterator[Message]:
        for message in messages:
            content = message.content
            round_ = int(content.config_records[wire.CONFIG].get(wire.ROUND, 0))  # type: ignore[arg-type]
            if round_ > self._round:
                self._round = round_
                model = wire.view(content.array_records[wire.ARRAYS][wire.MODEL].data)
                self._on_model(torch.from_numpy(model.copy()))
        return super().deliver(messages)


def attack(
    target: Target,
    *,
    label: int | str | None = None,
    settings: GanSettings | None = None,
    classifier: PublicClassifier | None = None,
    inception: InceptionFeatures | None = None,
    progress: OnProgress | None = None,
) -> ClassFinding:
    """Run the recipe's federation with a curious last client, which watches every released model.

    Args:
        target: a recipe or a seeded run; its federation is run again.
        label: number or name of the class to reconstruct; by default the class with the highest
            number that other clients hold and the last client does not hold.
        settings: settings of the attacker's training.
        classifier: classifier that measures distances; by default one is trained on the test set.
        inception: features for Inception distances.
        progress: called with (rounds done, total, description).

    Raises:
        ConfigError: the curious client holds the class, or no client holds it.
        RunError: the run has no seed, so its models cannot be released again.
    """
    assembly = target.assembly(reconstructs=True)
    if target.folder is not None and target.recipe.run.seed is None:
        raise RunError(
            f"{target.folder.path} has no seed and keeps only its last models: the attack watches "
            f"every round, so pass the recipe ({target.folder.recipe_file}), whose federation is "
            "then run again with fresh noise"
        )
    data, partition = Images.of(assembly.data.dataset), assembly.data.partition
    own_rows = partition[len(partition) - 1]
    label = (
        _isolated_class(data.train_y, own_rows, data.classes)
        if label is None
        else class_number(assembly.data.dataset, label)
    )
    private = torch.from_numpy(data.train_x[data.train_y == label])
    if len(private) < 2:
        raise ConfigError(
            f"the federation holds {len(private)} images of class {label}: there is nothing to "
            "reconstruct"
        )
    curious = ClassReconstruction(
        assembly.model.module(),
        target=label,
        x=torch.from_numpy(data.train_x[own_rows]),
        y=torch.from_numpy(data.train_y[own_rows]),
        classes=data.classes,
        settings=settings,
    )
    classifier = classifier or PublicClassifier.train(*data.test, data.classes)
    federation = in_usual_pixels(target.twin("gan"), (assembly.data.dataset, partition))

    def on_round(row: FullRow) -> None:
        if progress is not None:
            progress(row["round"], assembly.recipe.federation.rounds, f"class {label}")

    with tempfile.TemporaryDirectory() as scratch:
        module, result = train(
            federation,
            Path(scratch) / "run",
            grid=lambda client: _Watched.of(client, curious.observe),
            progress=on_round,
        )
    curious.observe(assembly.model.layers.flatten(module))
    samples = curious.samples(len(private))
    others = [
        torch.from_numpy(data.train_x[data.train_y == other])
        for other in range(data.classes)
        if other != label
    ]
    return ClassFinding(
        target=label,
        distance=classifier.distance(samples, private),
        floor=classifier.distance(private[::2], private[1::2]),
        nearest_class=min(
            classifier.distance(other, private) for other in others if len(other) > 1
        ),
        agreement=classifier.agreement(samples, label),
        classifier_accuracy=classifier.accuracy,
        images=len(samples),
        samples=samples,
        private=private,
        result=result,
        inception_distance=None if inception is None else inception.distance(samples, private),
        inception_floor=None
        if inception is None
        else inception.distance(private[::2], private[1::2]),
    )


def _isolated_class(labels: np.ndarray, own_rows: np.ndarray, classes: int) -> int:
    """Find the class with the highest number that only the other clients hold."""
    missing = np.setdiff1d(np.unique(labels), np.unique(labels[own_rows]))
    if not len(own_rows) or not len(missing):
        raise ConfigError(
            "the last client is the curious client: it must hold images, and lack a class that "
            "other clients hold; use data.partition = 'isolation' (see fedlgm partition)"
        )
    return int(missing.max())
