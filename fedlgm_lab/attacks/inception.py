"""Frechet Inception distances for users who have the weights of the network, which the library does
not download.

The network and its preprocessing are those of torch-fidelity, and the distance is
`fedlgm_lab.attacks.frechet.frechet_distance`. The distances are therefore comparable only with
those of papers that use the same weights. Inception has 2,048 features, and a few hundred small
grey images say little about their covariance. `PublicClassifier` is therefore the default.
"""

from __future__ import annotations

import pickle
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from fedlgm.errors import ConfigError
from fedlgm.files import explain_failure
from fedlgm_lab.attacks.frechet import frechet_distance

WEIGHTS = "weights-inception-2015-12-05-6726825d.pth"
"""Name of the file of weights that torch-fidelity publishes."""
_BATCH = 32


class InceptionFeatures:
    """The 2,048 features of an Inception-v3 network with given weights.

    The weights are not part of the library, so no example can run here; docs/how-to/attack.md shows
    how to use the class.

    Args:
        weights: file with the weights as torch-fidelity publishes them (`WEIGHTS`); no code in the
            file is executed. Default: the file of that name in torch's cache (the folder
            "checkpoints" in `torch.hub.get_dir()`).

    Raises:
        ConfigError: torch-fidelity is not installed, there is no such file, or it holds other
            weights.

    Source: Heusel et al., "GANs Trained by a Two Time-Scale Update Rule", NeurIPS 2017.
    """

    def __init__(self, weights: Path | str | None = None) -> None:
        try:
            from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
        except ImportError as error:
            raise ConfigError(
                "Inception distances need the package torch-fidelity: pip install "
                "'fedlgm[inception]'"
            ) from error
        path = (
            Path(torch.hub.get_dir()) / "checkpoints" / WEIGHTS
            if weights is None
            else Path(weights)
        )
        if not path.is_file():
            raise ConfigError(
                f"no Inception weights at {path}: fedlgm does not download them; put "
                f"torch-fidelity's {WEIGHTS} there, or pass its path"
            )
        try:
            # refuses files that contain code, which the extractor would unpickle and execute
            torch.load(path, map_location="cpu", weights_only=True)
            self._network = FeatureExtractorInceptionV3(
                "inception", ["2048"], feature_extractor_weights_path=str(path)
            )
        except (
            OSError,
            EOFError,
            RuntimeError,
            AttributeError,
            TypeError,
            pickle.UnpicklingError,
        ) as error:
            raise ConfigError(
                explain_failure(f"{path} does not hold torch-fidelity's Inception weights", error)
            ) from error

    @torch.no_grad()
    def features(self, x: Tensor) -> np.ndarray:
        """Compute the features, float64 [n, 2048], of images [n, C, H, W] with pixels in [-1, 1]
        and one or three channels.

        Pixels are rounded to 8 bits, as in files; one channel is repeated three times.

        Raises:
            ConfigError: the images have another shape.
        """
        if x.ndim != 4 or x.shape[1] not in (1, 3):
            raise ConfigError(f"Inception takes images [n, 1 or 3, H, W], got {tuple(x.shape)}")
        pixels = ((x.clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)
        coloured = pixels.expand(-1, 3, -1, -1)
        return (
            torch.cat([self._network(part)[0] for part in coloured.split(_BATCH)]).double().numpy()
        )

    def distance(self, first: Tensor, second: Tensor) -> float:
        """Compute the Frechet Inception distance of two sets of images [n, C, H, W] and [m, C, H,
        W].
        """
        return frechet_distance(self.features(first), self.features(second))
