"""The largest permitted upload of a client if a trainer bounds examples, as a public function of
the plan.

If the sum bounds whole updates, the plan's bound limits a client's upload. If a trainer bounds
examples, a client adds up all of its examples, and without a cap an upload of any size would count.
The cap is the largest upload that bounds, noise and the expected number of examples of a step
permit. Clients clip to the cap after adding noise, which is post-processing. A server counts larger
uploads as zero.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from torch import Tensor

from fedlgm.noise.draws import grid_step
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.trust import NEGLIGIBLE, gaussian_norm

# (1 - b1) / sqrt((1 - b2) (1 - b1^2 / b2)), the largest move of a coordinate in one step of Adam,
# divided by lr
_ADAM = 7.3
_ROUNDING = 1 + 1e-4  # margin for the rounding of float32 weights over a round's steps


@dataclass(frozen=True)
class _Steps:
    """Factors that turn the bound and the noise of one step into those of a round."""

    rows: float  # largest number of examples in a step
    signal: float  # factor for a sum that is the same in every step
    noise: float  # factor for independent sums


@lru_cache(maxsize=16)
def upload_caps(plan: ReleasePlan) -> np.ndarray:
    """Largest l2 norm of each released part of one client's upload, [parts], under a plan that
    bounds examples.

    Except with probability 1e-15, a step adds up no more examples than a Poisson batch of the
    expected size contains, each within its bound. Under local trust, SGD moves a client's model by
    lr / B times k such sums and their noise, and by more with momentum. Adam moves no coordinate by
    more than 7.3 lr per step.

    Args:
        plan: a plan with `bounded_by` "trainer".

    Example:
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> from fedlgm.planning.facts import LocalSteps, LocalTraining
        >>> facts = RunFacts(
        ...     1.0, Sampling("poisson", 10, 1.0), trust="local",
        ...     steps=LocalSteps(4, 0.1, 32.0), training=LocalTraining(lr=0.5),
        ... )
        >>> proven = Guarantee("proven", "an example", trust="local", unit="example")
        >>> plan = ReleasePlan(
        ...     LayerTable.from_sizes({"weight": 100}), [1.0], [1.0], facts, proven, bounded_by="trainer"
        ... )
        >>> bool(2 < upload_caps(plan)[0] < 10)
        True
    """
    steps, training = plan.facts.steps, plan.facts.training
    released = len(plan.indices)
    if steps is None:
        noised = float(plan.facts.noised_by.uploads_released)
        layer_steps = query = _Steps(
            _most(plan.facts.sampling.population, plan.facts.sampling.rate), 1.0, noised
        )
    else:
        rows, count = steps.batch + 8 * math.sqrt(steps.batch) + 40, steps.count
        # For answers to queries, a client sends the mean over the round's steps.
        query = _Steps(rows, 1 / steps.batch, 1 / (math.sqrt(count) * steps.batch))
        # With momentum, a step's sum also moves the model in all later steps of the round.
        moves = (1 - training.momentum ** np.arange(1, count + 1)) / (1 - training.momentum)
        moves *= training.lr / steps.batch
        layer_steps = _Steps(rows, float(moves.sum()), float(np.linalg.norm(moves)))
    caps = []
    for place, part in enumerate(plan.parts):
        kind = layer_steps if place < released else query
        if steps and training.optimizer == "adam" and place < released:
            caps.append(_ADAM * training.lr * steps.count * math.sqrt(part.size))
            continue
        cap = kind.signal * kind.rows * part.clip
        if kind.noise and part.sigma > 0:
            root = math.sqrt(part.size)
            cap += (
                kind.noise * part.sigma * gaussian_norm(part.size)
                + kind.signal * grid_step(part.sigma) * root
            )
        caps.append(cap)
    limits = np.array(caps) * _ROUNDING
    limits.setflags(write=False)
    return limits


def within_caps(upload: Tensor, plan: ReleasePlan) -> Tensor:
    """A client's noisy upload [plan.size], with every part clipped to its cap. The upload is
    unchanged if all parts are within their caps.
    """
    sizes, limits = [part.size for part in plan.parts], upload_caps(plan)
    lengths = [torch.linalg.vector_norm(piece) for piece in upload.split(sizes)] if sizes else []
    if all(float(norm) <= limit for norm, limit in zip(lengths, limits.tolist(), strict=True)):
        return upload
    norms = torch.stack(lengths)
    caps = torch.from_numpy(limits.copy()).to(norms)
    scale = torch.where(norms > caps, caps / norms, torch.ones_like(norms))
    return upload * torch.repeat_interleave(scale, torch.tensor(sizes, device=scale.device))


def _most(population: int, rate: float) -> float:
    """Number of examples that a Poisson batch of all clients' examples exceeds only with a
    negligible probability.
    """
    import scipy.stats

    return float(
        max(scipy.stats.binom.isf(NEGLIGIBLE, population, min(rate, 1.0)), population * rate)
    )
