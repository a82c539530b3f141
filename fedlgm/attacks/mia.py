"""Membership inference from a model's outputs and from the representation in each of its layers.

Outputs are attacked by thresholds that need no training (Yeom et al., CSF 2018; Song and Mittal, USENIX Security 2021).
Representations are attacked by one classifier per layer, fitted on shadow models whose members are known: the risk
estimate of "Mitigating Membership Inference in Intermediate Representations via Layer-wise MIA-risk-aware DP-SGD"
(Section 4.1 and Algorithm 2).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn

from fedlgm.attacks.membership import MembershipResult, evaluate_scores
from fedlgm.errors import ConfigError

_MAP = 4  # side that feature maps are averaged to
OnLayer = Callable[[str], None]


@dataclass(frozen=True, eq=False)
class ShadowModel:
    """A model whose members the attacker knows.

    Attributes:
        module: the trained model.
        members: inputs it was trained on, [n, C, H, W].
        others: inputs it was not trained on, [m, C, H, W].

    Example:
        >>> from fedlgm import models
        >>> model = models.build("mlp", in_shape=(1,), classes=2, hidden=[8])
        >>> inside, outside = torch.linspace(4, 6, 1000)[:, None], torch.linspace(-6, -4, 1000)[:, None]
        >>> adversary = LayerAdversary([ShadowModel(model, inside, outside)])
        >>> set(adversary.error_rates().values())  # far apart in every layer
        {0.0}
    """

    module: nn.Module
    members: Tensor
    others: Tensor


@torch.no_grad()
def output_scores(module: nn.Module, x: Tensor, y: Tensor, batch_size: int = 1000) -> dict[str, np.ndarray]:
    """Scores of examples from the model's outputs, by attack; higher means "member", float64 [n] each.

    "loss": minus the cross-entropy. "confidence": the largest probability; needs no label. "entropy": minus the entropy
    of the prediction; needs no label. "modified-entropy": minus the entropy that uses the label (Song and Mittal,
    equation 8).

    Args:
        module: a classifier: inputs to logits.
        x: inputs [n, ...].
        y: labels [n].
        batch_size: inputs of one pass.

    Example:
        >>> scores = output_scores(nn.Identity(), torch.tensor([[2.0, 0.0]]), torch.tensor([0]))
        >>> round(float(scores["loss"][0]), 4), round(float(scores["confidence"][0]), 4)  # ln of 1 / (1 + e^-2)
        (-0.1269, -0.1269)
    """
    module.eval()
    log_p = torch.cat([torch.log_softmax(module(part).double(), dim=1) for part in x.split(batch_size)])
    p = log_p.exp()
    own, own_log = p.gather(1, y[:, None])[:, 0], log_p.gather(1, y[:, None])[:, 0]
    log_rest = torch.log1p(-p.clamp(max=1 - 1e-12))
    others = (p * log_rest).sum(dim=1) - own * log_rest.gather(1, y[:, None])[:, 0]
    return {
        "loss": own_log.numpy(),
        "confidence": log_p.max(dim=1).values.numpy(),
        "entropy": (p * log_p).sum(dim=1).numpy(),
        "modified-entropy": ((1 - own) * own_log + others).numpy(),
    }


@torch.no_grad()
def representations(module: nn.Module, x: Tensor, batch_size: int = 500) -> dict[str, np.ndarray]:
    """Output of every module that holds its own parameters, by the module's name, float32 [n, features] each.

    The names are those of the layers of `LayerTable.from_module`. Feature maps larger than 4x4 are averaged to 4x4.

    Args:
        module: any model.
        x: inputs [n, ...].
        batch_size: inputs of one pass.

    Example:
        >>> model = nn.Sequential(nn.Conv2d(1, 2, 3, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(128, 3))
        >>> {name: values.shape for name, values in representations(model, torch.zeros(5, 1, 8, 8)).items()}
        {'0': (5, 32), '3': (5, 3)}
    """
    found: dict[str, list[Tensor]] = {}
    seen: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, object, Tensor], None]:
        def hook(_: nn.Module, __: object, output: Tensor) -> None:
            small = output
            if output.ndim == 4 and max(output.shape[-2:]) > _MAP:
                small = nn.functional.adaptive_avg_pool2d(output, _MAP)
            seen[name] = small.flatten(1)  # the last output, where a module is used more than once

        return hook

    hooks = [
        child.register_forward_hook(keep(name))
        for name, child in module.named_modules()
        if any(True for _ in child.parameters(recurse=False))
    ]
    module.eval()
    try:
        for part in x.split(batch_size):
            module(part)
            for name, output in seen.items():
                found.setdefault(name, []).append(output)
    finally:
        for hook in hooks:
            hook.remove()
    return {name: torch.cat(parts).numpy() for name, parts in found.items()}


_MANY = 1000
"""Examples, of all shadow models, from which on scikit-learn's batches of 200 are small enough: of fewer examples they
are so few steps that training is stopped early before anything is learned."""


class LayerAdversary:
    """A classifier for every layer that tells members' representations from others'.

    Args:
        shadows: models to fit it on; several, whose members differ, keep it from learning the examples themselves.
        hidden: hidden units of each classifier.
        seed: seed of their weights and batches.
        progress: called with each layer's name when its classifier is fitted.

    Raises:
        ConfigError: no shadow model, or one without members or without others.

    Example:
        >>> from fedlgm import models
        >>> model = models.build("mlp", in_shape=(1,), classes=2, hidden=[8])
        >>> inside, outside = torch.linspace(4, 6, 1000)[:, None], torch.linspace(-6, -4, 1000)[:, None]
        >>> adversary = LayerAdversary([ShadowModel(model, inside, outside)])
        >>> [result.auc for result in adversary.attack(model, inside[:10], outside[:10]).values()]
        [1.0, 1.0]
    """

    def __init__(
        self, shadows: Sequence[ShadowModel], *, hidden: int = 32, seed: int = 0, progress: OnLayer | None = None
    ) -> None:
        if not shadows or any(min(len(s.members), len(s.others)) < 2 for s in shadows):
            raise ConfigError("a layer adversary needs shadow models with at least two members and two other examples")
        self._classifiers = {}
        self._training: dict[str, tuple[np.ndarray, np.ndarray]] = {}
        pairs = [(representations(s.module, s.members), representations(s.module, s.others)) for s in shadows]
        for name in pairs[0][0]:
            x = np.concatenate([part[name] for pair in pairs for part in pair])
            y = np.concatenate(
                [np.repeat([1, 0], [len(inside[name]), len(outside[name])]) for inside, outside in pairs]
            )
            batch = "auto" if len(y) >= _MANY else max(1, len(y) // 50)
            kind = {"batch_size": batch, "max_iter": 60, "early_stopping": True, "random_state": seed}
            classifier = make_pipeline(StandardScaler(), MLPClassifier((hidden,), alpha=1e-2, **kind))
            self._classifiers[name] = classifier.fit(_finite(x), y)
            self._training[name] = x, y
            if progress is not None:
                progress(name)

    @property
    def layers(self) -> tuple[str, ...]:
        """Names of the layers, in the order of the forward pass."""
        return tuple(self._classifiers)

    def scores(self, module: nn.Module, x: Tensor) -> dict[str, np.ndarray]:
        """Log-odds that each input [n, ...] is a member, by layer, float64 [n] each."""
        inside = {name: self._classifiers[name].predict_proba(_finite(values))[:, 1] for name, values in
                  representations(module, x).items()}  # fmt: skip
        return {name: np.log(p + 1e-12) - np.log(1 - p + 1e-12) for name, p in inside.items()}

    def attack(self, module: nn.Module, members: Tensor, others: Tensor) -> dict[str, MembershipResult]:
        """Results against a model whose members the adversary did not know, by layer."""
        inside, outside = self.scores(module, members), self.scores(module, others)
        return {name: evaluate_scores(inside[name], outside[name]) for name in inside}

    def error_rates(self) -> dict[str, float]:
        """Share of its own training examples that each layer's classifier gets wrong (Algorithm 2), by layer.

        These are the risk estimates ER of LM-DP-SGD, which the paper measures on the classifiers' training set; a
        classifier that overfits has too low a rate. `attack` on a held-out model avoids this.
        """
        return {
            name: float((self._classifiers[name].predict(_finite(x)) != y).mean())
            for name, (x, y) in self._training.items()
        }


def attack_outputs(
    module: nn.Module, members: tuple[Tensor, Tensor], others: tuple[Tensor, Tensor]
) -> dict[str, MembershipResult]:
    """Results of the output attacks, by attack.

    Args:
        module: the attacked classifier.
        members: inputs [n, ...] and labels [n] it was trained on.
        others: inputs [m, ...] and labels [m] it was not trained on.

    Example:
        >>> sure, unsure = torch.tensor([[4.0, 0.0], [3.0, 0.0]]), torch.tensor([[1.0, 0.0], [0.0, 0.0]])
        >>> labels = torch.tensor([0, 0])
        >>> attack_outputs(nn.Identity(), (sure, labels), (unsure, labels))["loss"].auc
        1.0
    """
    inside, outside = output_scores(module, *members), output_scores(module, *others)
    return {name: evaluate_scores(inside[name], outside[name]) for name in inside}


def _finite(values: np.ndarray) -> np.ndarray:
    """Replace values that overflowed, as they may in a model of mostly noise."""
    return np.clip(np.nan_to_num(values.astype(np.float64), nan=0.0), -1e12, 1e12)
