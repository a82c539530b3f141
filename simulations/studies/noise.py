"""The amount of noise in a run's model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedlgm import correlation
from simulations.reports.rounds import layer_norms, noise_so_far, stored_sigma
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RoundRow


def model_noise(folder: RunFolder, rows: Sequence[RoundRow]) -> np.ndarray:
    """Root mean square l2 norm of the noise in the model after each round, apart from the server's learning rate, [T].

    Noise of independent rounds adds up in squares; correlated noise cancels, within each layer as far as the layer's
    noise scale stays the same.

    Args:
        folder: folder of the run.
        rows: its rounds, from the first one on, [T].
    """
    recipe = folder.recipe()
    if recipe.noise is None:
        scales = np.array([[row["noise_scale"]] for row in rows])
        return noise_so_far(scales, correlation.get("identity", len(rows)), recipe.workload)
    sizes = np.array(list(folder.provenance.layers().values()))
    layers = layer_norms(stored_sigma(rows), sizes, recipe.sampling)
    return noise_so_far(layers, recipe.noise.leading(len(rows)), recipe.workload)
