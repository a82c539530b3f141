"""Check at the end of a run with frozen parameters: the frozen parameters have not changed, and all
others have.
"""

from __future__ import annotations

import warnings

import torch

from fedlgm.errors import Notice, RunError
from fedlgm.planning.transcript import Transcript
from simulations.config.fingerprints import fixed_digest
from simulations.config.run_model import RunModel
from simulations.runs.rows import RunSummary


class FrozenBase:
    """The frozen part of a run's model, as it is before the first round.

    Args:
        model: the run's model.
    """

    def __init__(self, model: RunModel) -> None:
        module = model.module()
        self._model, self._start = model, model.layers.flatten(module)
        self._digest = (
            "" if all(each.requires_grad for each in module.parameters()) else fixed_digest(module)
        )

    def check(self, final: Transcript) -> RunSummary:
        """Compare with the model after the last round; a model without frozen parameters is not
        checked.

        Returns:
            `base_sha256`, and in `unmoved` the parameters that still have their initial values,
            which a warning names.

        Raises:
            RunError: the frozen parameters or buffers have changed.
        """
        if not self._digest:
            return {}
        if fixed_digest(self._model.module()) != self._digest:
            raise RunError(
                "the frozen parameters of the model changed during the run, so its adapters fit "
                "no base: other code changes the model, or the file model.weights was replaced"
            )
        layers = self._model.layers
        before, after = layers.unflatten(self._start), layers.unflatten(final.models[-1].cpu())
        unmoved = [name for name, value in before.items() if torch.equal(value, after[name])]
        if unmoved and final.rounds:
            warnings.warn(
                Notice(
                    f"the run has not changed these parameters: {', '.join(unmoved)}; no round "
                    "released them, or their updates were zero"
                ),
                stacklevel=2,
            )
        return {"base_sha256": self._digest, "unmoved": unmoved}
