"""The task of survival in discrete time, with one hazard for each interval of the follow-up.

Source: Singer and Willett, Journal of Educational Statistics 18 (1993). Cox's partial likelihood
compares each patient with all other patients at risk. Here, by contrast, the loss of a row needs no
other row.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from typing_extensions import override

from fedlgm.data import DataSet
from fedlgm.errors import ConfigError, DataError
from fedlgm.training.tasks.set_metrics import Metric
from fedlgm.training.tasks.task import Task, require_finite


class Hazards(Task):
    """Negative log-likelihood of the discrete-time hazards, with the concordance of the predicted
    risks as a metric.

    Targets are (time, event) [n, 2]. With event 1, the time is that of the event; with event 0,
    there was no event, and the time is that of the last visit. Output k is the logit of the hazard
    in interval k, which is the probability of the event given survival to the beginning of this
    interval. A row whose last visit without an event lies within an interval counts only for the
    earlier intervals.

    Args:
        breaks: public ends of the intervals, in increasing order. A time after the last break
            counts as survival of all intervals.

    Raises:
        ConfigError: the breaks are not finite, positive and increasing.

    Example:
        >>> task = Hazards([6, 12, 24])
        >>> task.targets(np.array([[8.0, 1.0], [13.0, 0.0]]), "test")[..., 0].tolist()  # -1: not at risk
        [[0.0, 1.0, -1.0], [0.0, 0.0, -1.0]]
    """

    name = "hazards"
    headline = "concordance"
    better = "higher"

    def __init__(self, breaks: Sequence[float]) -> None:
        try:
            ends = np.asarray(breaks, np.float64).reshape(-1)
        except (TypeError, ValueError):
            ends = np.zeros(0)
        if not (len(ends) and np.isfinite(ends).all() and (np.diff(ends, prepend=0) > 0).all()):
            raise ConfigError(
                "task 'hazards': breaks must be the rising ends of its intervals, above 0, such as "
                f"[6, 12, 24], got {breaks!r}"
            )
        self._breaks = tuple(ends.tolist())

    def intervals(self) -> list[str]:
        """Names of the intervals, in the order of the outputs.

        Example:
            >>> Hazards([6, 12]).intervals()
            ['0 to 6', '6 to 12']
        """
        return [
            f"{start:g} to {end:g}"
            for start, end in zip((0.0, *self._breaks), self._breaks, strict=False)
        ]

    @override
    def targets(self, y: np.ndarray, part: str) -> np.ndarray:
        """Convert each row to one number per interval, float32 [n, K, 1]: 1 (the event), 0
        (survival) or -1 (not at risk). Targets that already have three axes are returned unchanged.

        Raises:
            DataError: a row is not a time of at least 0 followed by an event of 0 or 1.
        """
        if y.ndim == 3:
            return y
        if y.ndim != 2 or y.shape[1] != 2:
            raise DataError(
                "task 'hazards' needs two numbers per row, time and event, as in 'target': "
                f"['months', 'died'], but the {part} targets have shape {y.shape}"
            )
        require_finite(y, part)
        time, event = y.astype(np.float64).T
        if (time < 0).any() or not np.isin(event, (0, 1)).all():
            raise DataError(
                f"task 'hazards' needs times of at least 0 and events 0 (censored) or 1, but some "
                f"{part} targets have other values"
            )
        number = np.arange(len(self._breaks))
        died = np.searchsorted(self._breaks, time, side="left")[:, None]
        survived = np.where(
            event[:, None] == 1, died, np.searchsorted(self._breaks, time, side="right")[:, None]
        )
        codes = np.where(number < survived, 0.0, -1.0)
        codes[(event[:, None] == 1) & (number == died)] = 1.0
        return codes[..., None].astype(np.float32)

    @override
    def labels(self, y: np.ndarray) -> bool:
        return False

    @override
    def outputs(self, data: DataSet) -> int:
        return len(self._breaks)

    @override
    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        codes = targets.squeeze(-1)
        losses = functional.binary_cross_entropy_with_logits(
            outputs, codes.clamp(min=0), reduction="none"
        )
        return torch.where(codes >= 0, losses, torch.zeros_like(losses)).sum(1)

    @override
    def set_metrics(self) -> Mapping[str, Metric]:
        return {"concordance": lambda outputs, targets: concordance(outputs, targets)}


def concordance(outputs: Tensor, targets: Tensor) -> float:
    """Compute the share of comparable pairs in which the row with the earlier event has the higher
    predicted risk (Harrell's C). Equal risks count as half. The result is NaN if no pair is
    comparable.

    Args:
        outputs: logits of the hazards [n, K].
        targets: targets that `Hazards.targets` has converted, [n, K, 1].

    Example:
        >>> targets = Hazards([1, 2]).targets(np.array([[1, 1], [2, 1], [2, 0]]), "test")
        >>> concordance(torch.tensor([[2.0, 2.0], [0.0, 0.0], [-2.0, -2.0]]), torch.from_numpy(targets))
        1.0
    """
    codes = targets.squeeze(-1)
    # the expected number of intervals that a row survives
    survival = torch.cumprod(torch.sigmoid(-outputs.double()), 1).sum(1)
    event, survived = (codes == 1).any(1), (codes == 0).sum(1)
    earlier = survived[:, None] < survived
    together = (survived[:, None] == survived) & ~event
    comparable = event[:, None] & (earlier | together)
    comparable &= ~torch.eye(len(codes), dtype=torch.bool)
    right = (survival[:, None] < survival).double() + (survival[:, None] == survival).double() / 2
    count = int(comparable.sum())
    return float((right * comparable).sum() / count) if count else float("nan")
