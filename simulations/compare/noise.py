"""How much noise a run's model has received."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from fedlgm import correlation
from simulations.reports.rounds import noise_so_far
from simulations.runs.folder import RunFolder
from simulations.runs.rows import RoundRow


def model_noise(folder: RunFolder, rows: Sequence[RoundRow]) -> np.ndarray:
    """Root mean square l2 norm of the noise in the model after each round, the server's learning rate aside, [T].

    Noise of independent rounds adds up in squares; correlated noise cancels, within each layer as far as the layer's
    noise scale stays the same.

    Args:
        folder: of the run.
        rows: its rounds, from the first one on, [T].
    """
    recipe = folder.recipe()
    if recipe.noise is None:
        scales = np.array([[row["noise_scale"]] for row in rows])
        return noise_so_far(scales, correlation.get("identity", len(rows)), recipe.workload)
    sigma = np.array([[np.nan if each is None else each for each in row["sigma"]] for row in rows])
    sizes = np.array(list(folder.provenance.read()["layers"].values()))
    layers = sigma * np.sqrt(sizes) / recipe.sampling.expected
    return noise_so_far(layers, recipe.noise.leading(len(rows)), recipe.workload)
