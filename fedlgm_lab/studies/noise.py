"""The amount of noise in a run's model."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedlgm.noise import correlation
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RoundRow
from simulations.summaries.rounds import layer_norms, noise_so_far, stored_sigma


def model_noise(folder: RunFolder, rows: Sequence[RoundRow]) -> np.ndarray:
    """Compute the root mean square of the l2 norm of the noise in the model after each round, for a
    server learning rate of 1, [T].

    If the noise of the rounds is independent, the squared norms add up. Correlated noise cancels
    within each layer, as far as the layer's noise scale stays the same.

    Args:
        folder: folder of the run.
        rows: rounds of the run, from the first one, [T].
    """
    recipe = folder.recipe()
    if recipe.noise is None:
        scales = np.array([[row["noise_scale"]] for row in rows])
        return noise_so_far(scales, correlation.get("identity", len(rows)), recipe.workload)
    sizes = np.array(list(folder.provenance.layers().values()))
    layers = layer_norms(stored_sigma(rows), sizes, recipe.sampling)
    return noise_so_far(layers, recipe.noise.leading(len(rows)), recipe.workload)
