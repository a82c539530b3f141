"""Membership inference from a model's outputs, by scores that need no shadow models.

Source: Yeom et al., CSF 2018; Song and Mittal, USENIX Security 2021.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm_lab.attacks.membership import MembershipResult, evaluate_scores


@torch.no_grad()
def output_scores(module: nn.Module, x: Tensor, y: Tensor) -> dict[str, np.ndarray]:
    """Compute scores of examples from the model's outputs, by attack, float64 [n] each; a higher
    score means "member".

    "loss" is minus the cross-entropy. "confidence" is the logarithm of the largest probability, and
    "entropy" is minus the entropy of the prediction; these two scores need no label.
    "modified-entropy" is minus a modified entropy that uses the label (Song and Mittal, equation
    8).

    Args:
        module: a classifier, which maps inputs to logits.
        x: inputs [n, ...].
        y: labels [n].

    Example:
        >>> scores = output_scores(nn.Identity(), torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        >>> round(float(scores["loss"][0]), 4), round(float(scores["confidence"][0]), 4)  # ln of 1 / (1 + e^-2)
        (-0.1269, -0.1269)
    """
    module.eval()
    log_p = torch.cat([torch.log_softmax(module(part).double(), dim=1) for part in x.split(1000)])
    p = log_p.exp()
    p_true, log_p_true = p.gather(1, y[:, None])[:, 0], log_p.gather(1, y[:, None])[:, 0]
    log_rest = torch.log1p(-p.clamp(max=1 - 1e-12))
    others = (p * log_rest).sum(dim=1) - p_true * log_rest.gather(1, y[:, None])[:, 0]
    return {
        "loss": log_p_true.numpy(),
        "confidence": log_p.max(dim=1).values.numpy(),
        "entropy": (p * log_p).sum(dim=1).numpy(),
        "modified-entropy": ((1 - p_true) * log_p_true + others).numpy(),
    }


def attack_outputs(
    module: nn.Module, members: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]
) -> dict[str, MembershipResult]:
    """Attack a classifier by its outputs, and return each attack's result.

    Args:
        module: the attacked classifier.
        members: inputs [n, ...] and labels [n] on which the classifier was trained.
        others: inputs [m, ...] and labels [m] on which the classifier was not trained.

    Example:
        >>> sure, unsure = torch.tensor([[4.0, 0.0], [3.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> labels = torch.tensor([0, 0])
        >>> attack_outputs(nn.Identity(), (sure, labels), (unsure, labels))["loss"].auc
        1.0
    """
    inside, outside = output_scores(module, *members), output_scores(module, *others)
    return {name: evaluate_scores(inside[name], outside[name]) for name in inside}
