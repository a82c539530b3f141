"""Past releases. Together with public configuration, they are the only input of an adaptive
plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from torch import Tensor

from fedlgm.planning.plan import ReleasePlan


@dataclass(frozen=True)
class Transcript:
    """Released outputs of the past rounds: the only data on which a plan may depend besides public
    configuration.

    Attributes:
        rounds: number of rounds released so far.
        models: the most recent global models, oldest first, each [D]; at most `DEPTH`. The last one
            is the current model.
        mean: the last released noisy mean (layers, then auxiliary queries), [plan.size]; None
            before the first round.
        plan: the plan that released `mean`.

    Example:
        >>> import torch
        >>> from fedlgm import Guarantee, LayerTable, RunFacts, Sampling
        >>> from fedlgm.planning.queries import BelowBound, NoisyQuery
        >>> layers, facts = LayerTable.from_sizes({"a": 2}), RunFacts(0.4, Sampling("poisson", 10, 0.5))
        >>> bits = NoisyQuery(BelowBound((2,)), 1.0)
        >>> plan = ReleasePlan(layers, [1.0], [1.0], facts, Guarantee("proven", "an example"), queries=(bits,))
        >>> mean = torch.tensor([0.1, -0.1, 0.25])  # the layer, then the answer to the query
        >>> Transcript.start(torch.zeros(2)).extend(mean[:2], mean, plan).answer("below-bound").tolist()
        [0.75]
    """

    DEPTH = 3

    rounds: int
    models: tuple[Tensor, ...]
    mean: Tensor | None = None
    plan: ReleasePlan | None = None

    @classmethod
    def start(cls, model: Tensor) -> Transcript:
        """The transcript before the first round; the initial model is public."""
        return cls(0, (model,))

    def extend(self, model: Tensor, mean: Tensor, plan: ReleasePlan) -> Transcript:
        """The transcript after one more round."""
        models = (*self.models, model)[-self.DEPTH :]
        return replace(self, rounds=self.rounds + 1, models=models, mean=mean, plan=plan)

    def problem(self) -> str:
        """The reason why no run can have this transcript, as part of a sentence; empty if a run can
        have it.

        Example:
            >>> import torch
            >>> Transcript.start(torch.zeros(2)).problem(), Transcript(3, (torch.zeros(2),)).problem()
            ('', '3 rounds leave 3 models, not 1')
        """
        models, sizes = min(self.rounds + 1, self.DEPTH), {model.numel() for model in self.models}
        if self.rounds < 0:
            return f"it states {self.rounds} rounds"
        if len(self.models) != models:
            return f"{self.rounds} rounds leave {models} models, not {len(self.models)}"
        if len(sizes) != 1:
            return "its models differ in size"
        if self.rounds > 0 and (self.plan is None or self.mean is None):
            return "the last round has no plan or no released mean"
        if self.plan is not None and self.mean is not None and self.mean.numel() != self.plan.size:
            return f"the last round released {self.mean.numel()} numbers, but its plan has {self.plan.size}"
        return ""

    def answer(self, query: str) -> np.ndarray | None:
        """The decoded answer to the named auxiliary query in the last released mean; None if the
        last round did not ask it.
        """
        if self.mean is None or self.plan is None:
            return None
        position = sum(int(size) for size in self.plan.layers.sizes[self.plan.indices])
        for noisy in self.plan.queries:
            if noisy.query.name == query:
                return noisy.query.decode(self.mean[position : position + noisy.size])
            position += noisy.size
        return None

    def is_unanswered(self, query: str) -> bool:
        """Whether the named query has no answer: no round was released, or the last round asked the
        query and was void. A void round of a secure sum releases only zeros. Zeros are not an
        answer, so a vote must be held again.

        Example:
            >>> import torch
            >>> Transcript.start(torch.zeros(2)).is_unanswered("cut-vote")
            True
        """
        if self.mean is None or self.plan is None:
            return True
        return any(name == query for name, _, _ in self.plan.asked) and not bool(self.mean.any())
