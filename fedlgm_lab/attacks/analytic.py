"""Closed-form attacks on an update, which infer labels from the bias of the last layer, and a
client's only image from the first linear layer.

Source: Zhu and Blaschko, "R-GAP" (2021), Section 3.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.planning.layers import Slot
from fedlgm_lab.attacks.observation import Observation

Shape = tuple[int, int, int]
"""Channels, height and width of an image."""


def infer_labels(module: nn.Module, observation: Observation, images: int, shape: Shape) -> Tensor:
    """Infer the labels of a client's images from the direction in which the last bias moved, int64
    [images].

    Under cross-entropy this bias moves by a positive multiple of (share of each label) - (mean
    prediction). Labels are added one at a time, each so that the angle between this difference and
    the observed direction is smallest. The result is exact for one image without noise (Zhao,
    Mopuri and Bilen, 2020).

    Args:
        module: the classifier.
        observation: what the attacker sees.
        images: number of labels.
        shape: shape (C, H, W) of one image.

    Raises:
        ConfigError: the model's last parameter is not the bias of its logits.

    Example:
        >>> from fedlgm.planning.layers import LayerTable
        >>> model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3))
        >>> update = torch.cat([torch.zeros(12), torch.tensor([-0.03, 0.07, -0.04])])  # the bias comes last
        >>> infer_labels(model, Observation.unprotected(LayerTable.from_module(model), update), 1, (1, 2, 2))
        tensor([1])
    """
    with torch.no_grad():
        predicted = torch.softmax(module(torch.zeros(1, *shape)), dim=1)[0]
    slot = list(observation.layers.slots())[-1]
    if slot.shape != tuple(predicted.shape):
        raise ConfigError(
            "labels are inferred from the bias of the last layer, but the model's last parameter "
            f"{slot.name!r} has shape {slot.shape}: give the labels"
        )
    moved = observation.update[slot.offset : slot.offset + slot.size]
    counts = torch.zeros_like(predicted)
    for number in range(1, images + 1):
        candidates = (counts + torch.eye(len(counts))) / number - predicted
        counts[int(nn.functional.cosine_similarity(candidates, moved[None], dim=1).argmax())] += 1
    return torch.repeat_interleave(torch.arange(len(counts)), counts.long())


def analytic(
    module: nn.Module, observation: Observation, shape: Shape
) -> tuple[Tensor, bool] | None:
    """Compute a client's only image from the update of a first linear layer with a bias.

    The result is None if the model has no such layer, if the attacker does not see the layer, or if
    its bias did not move.

    For any number of local steps, the movement of each row of the weights is the movement of the
    row's bias times the image. The rows are combined by least squares to sum_i b_i W_i / sum_i
    b_i^2, where W_i and b_i are the movements of row i and of its bias. The expected square of the
    known noise is subtracted from the denominator.

    Args:
        module: the model.
        observation: what the attacker sees.
        shape: shape (C, H, W) of one image.

    Returns:
        The image [1, C, H, W], clipped to [-1, 1], and whether the image is exact because the layer
        has no noise.

    Example:
        >>> from fedlgm.planning.layers import LayerTable
        >>> model, image = nn.Sequential(nn.Flatten(), nn.Linear(4, 3)), torch.tensor([0.5, -0.5, 1.0, 0.0])
        >>> bias = torch.tensor([0.2, -0.1, -0.1])
        >>> update = torch.cat([torch.outer(bias, image).flatten(), bias])
        >>> found, exact = analytic(model, Observation.unprotected(LayerTable.from_module(model), update), (1, 2, 2))
        >>> torch.allclose(found.flatten(), image, atol=1e-6), exact
        (True, True)
    """
    first = _first_linear(module, observation, shape)
    if first is None:
        return None
    layer, weight, bias = first
    rows = (
        observation.update[weight.offset : weight.offset + weight.size].view(weight.shape).double()
    )
    moved = observation.update[bias.offset : bias.offset + bias.size].double()
    sigma = float(observation.sigma[layer])
    energy = float(moved.square().sum())
    if energy == 0:
        return None
    estimate = moved @ rows / max(energy - sigma**2 * len(moved), 0.1 * energy)
    low, high = (
        _entering(module, torch.full((1, *shape), value)).double() for value in (-1.0, 1.0)
    )
    # a model may map its images to another interval before the first layer
    image = (2 * estimate - low - high) / (high - low)
    return image.clamp(-1, 1).float().view(1, *shape), sigma == 0


def _entering(module: nn.Module, image: Tensor) -> Tensor:
    """Compute the flat input of the first layer with parameters."""
    given: list[Tensor] = []
    first = _first_layer(module)
    assert first is not None
    handle = first.register_forward_pre_hook(
        lambda _, inputs: given.append(inputs[0].detach().reshape(-1))
    )
    try:
        with torch.no_grad():
            module(image)
    finally:
        handle.remove()
    return given[0]


def _first_linear(
    module: nn.Module, observation: Observation, shape: Shape
) -> tuple[int, Slot, Slot] | None:
    """Find the index, the weight and the bias of the first layer, if the layer is linear, is
    visible and receives the whole image; otherwise None.
    """
    first = _first_layer(module)
    if (
        not isinstance(first, nn.Linear)
        or first.bias is None
        or first.in_features != int(np.prod(shape))
    ):
        return None
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    for index, layer in enumerate(observation.layers.layers):
        slots = {slot.name: slot for slot in layer.slots}
        weight, bias = slots.get(names[id(first.weight)]), slots.get(names[id(first.bias)])
        # If the weight and the bias are separate layers, they are scaled differently, and their
        # quotient says nothing about the image.
        if weight is not None and bias is not None and observation.visible[index]:
            return index, weight, bias
    return None


def _first_layer(module: nn.Module) -> nn.Module | None:
    """Find the first module with parameters, if only flattening comes before it; otherwise None."""
    for child in module.modules():
        if any(True for _ in child.parameters(recurse=False)):
            return child
        if not any(True for _ in child.children()) and not isinstance(
            child, nn.Flatten | nn.Identity
        ):
            return None
    return None
