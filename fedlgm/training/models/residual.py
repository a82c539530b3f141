"""Residual networks with GroupNorm."""

from __future__ import annotations

import math
from collections import OrderedDict
from contextlib import nullcontext
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from fedlgm.checks import check_count
from fedlgm.errors import ConfigError
from fedlgm.training.models.copies import copy_model


def resnet18(
    in_shape: tuple[int, int, int], classes: int, *, groups: int = 32, stem: str = "cifar"
) -> nn.Module:
    """Torchvision's ResNet-18 with GroupNorm: 11,173,962 parameters for 3 channels and 10 classes.

    Args:
        in_shape: shape (C, H, W) of one input.
        classes: number of outputs.
        groups: number of groups of each GroupNorm, by default 32 as in Wu and He (ECCV 2018). If it
            does not divide the number of channels, the greatest common divisor of the two is used.
        stem: "cifar" (3x3 convolution, no pooling, for images of about 32x32) or "imagenet" (7x7
            stride 2, MaxPool).

    Returns:
        The model.

    Raises:
        ConfigError: an option is out of range.
    """
    return _torchvision("resnet18", in_shape[0], classes, groups, stem)


def resnet152(
    in_shape: tuple[int, int, int], classes: int, *, groups: int = 32, stem: str = "cifar"
) -> nn.Module:
    """ResNet-152 of torchvision with GroupNorm, the deepest model of the LaDP-FL paper. The options
    are the same as for `resnet18`.
    """
    return _torchvision("resnet152", in_shape[0], classes, groups, stem)


def resnet20(in_shape: tuple[int, int, int], classes: int, *, groups: int = 16) -> nn.Module:
    """ResNet-20 for CIFAR (He et al., CVPR 2016, Section 4.2) with GroupNorm and projection
    shortcuts.

    The model has nine basic blocks of 16, 32 and 64 channels, and 272,474 parameters for 3 channels
    and 10 classes.

    Args:
        in_shape: shape (C, H, W) of one input.
        classes: number of outputs.
        groups: number of groups of each GroupNorm. If it does not divide the number of channels,
            the greatest common divisor of the two is used.

    Returns:
        The model.

    Raises:
        ConfigError: if `groups` is below 1.
    """
    from torchvision.models.resnet import BasicBlock, conv1x1

    norm = _norm(groups)
    layers: OrderedDict[str, nn.Module] = OrderedDict(
        conv1=nn.Conv2d(in_shape[0], 16, 3, padding=1, bias=False), norm1=norm(16), relu=nn.ReLU()
    )
    before = 16
    for stage, channels in enumerate((16, 32, 64), start=1):
        for i in range(3):
            stride = 2 if stage > 1 and i == 0 else 1
            shortcut = (
                nn.Sequential(conv1x1(before, channels, stride), norm(channels))
                if stride == 2
                else None
            )
            layers[f"block{stage}_{i + 1}"] = BasicBlock(
                before, channels, stride, shortcut, norm_layer=norm
            )
            before = channels
    layers["pool"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    layers["fc"] = nn.Linear(before, classes)
    model = nn.Sequential(layers)
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
    return _without_inplace(model)


def vgg16(
    in_shape: tuple[int, int, int], classes: int, *, groups: int = 32, head: str = "mean"
) -> nn.Module:
    """VGG-16 of torchvision with GroupNorm after every convolution, for images of at least 32x32.

    Args:
        in_shape: shape (C, H, W) of one input.
        classes: number of outputs.
        groups: number of groups of each GroupNorm. If it does not divide the number of channels,
            the greatest common divisor of the two is used.
        head: "mean" (mean over the positions and one linear layer: 14,728,266 parameters for 3
            channels and 10 classes) or "imagenet" (torchvision's three linear layers, without
            dropout: 134 million).

    Returns:
        The model.

    Raises:
        ConfigError: an option is out of range, or the input is too small.
    """
    from torchvision.models import vgg16_bn

    if head not in ("mean", "imagenet"):
        raise ConfigError(f"unknown head {head!r}; known: mean, imagenet")
    if min(in_shape[1:]) < 32:
        raise ConfigError(f"model 'vgg16' cannot take inputs of shape {in_shape}: at least 32x32")
    _norm(groups)
    with torch.device("meta") if head == "mean" else nullcontext():
        model: nn.Module = vgg16_bn(num_classes=classes, dropout=0.0)
        features = cast(nn.Sequential, to_groupnorm(cast(nn.Module, model.features), groups))
        features[0] = nn.Conv2d(in_shape[0], 64, 3, padding=1)
    model.features = features
    if head == "mean":
        features = features.to_empty(device=torch.get_default_device())
        model = nn.Sequential(
            OrderedDict(
                features=features,
                pool=nn.AdaptiveAvgPool2d(1),
                flatten=nn.Flatten(),
                fc=nn.Linear(512, classes),
            )
        )
        for module in model.modules():
            if isinstance(module, nn.GroupNorm):
                module.reset_parameters()
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
            nn.init.zeros_(cast(nn.Parameter, module.bias))
    return _without_inplace(model)


def to_groupnorm(module: nn.Module, groups: int = 32) -> nn.Module:
    """Copy a model, and replace every BatchNorm in the copy with GroupNorm. The copy computes no
    statistics over examples and has no buffers of BatchNorm.

    The copy keeps the weights and biases of the normalisation but not the running statistics, so a
    trained model needs further training.

    Args:
        module: any model; it is not changed.
        groups: number of groups of each GroupNorm. If it does not divide the number of channels,
            the greatest common divisor of the two is used. The input of a `BatchNorm1d` or
            `SyncBatchNorm` may have one value per channel, and the output of a group of one value
            would always be zero. In their place, each group therefore has at least 8 channels or
            all channels.

    Returns:
        The copy; its other parameters and their names are unchanged.

    Raises:
        ConfigError: if `groups` is below 1.

    >>> from torch import nn
    >>> norm = to_groupnorm(nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)), groups=4)[1]
    >>> type(norm).__name__, norm.num_groups
    ('GroupNorm', 4)
    """
    norm = _norm(groups)
    module = copy_model(module)
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, nn.modules.batchnorm._BatchNorm):
                setattr(parent, name, _to_group_norm(child, norm))
    return (
        _to_group_norm(module, norm)
        if isinstance(module, nn.modules.batchnorm._BatchNorm)
        else module
    )


def _to_group_norm(batch_norm: nn.modules.batchnorm._BatchNorm, norm: Any) -> nn.GroupNorm:
    layer: nn.GroupNorm = norm(batch_norm.num_features)
    if isinstance(batch_norm, nn.BatchNorm1d | nn.SyncBatchNorm):
        groups = math.gcd(layer.num_groups, max(1, layer.num_channels // 8))
        layer = nn.GroupNorm(groups, layer.num_channels)
    if not batch_norm.affine:
        return nn.GroupNorm(layer.num_groups, layer.num_channels, eps=batch_norm.eps, affine=False)
    layer.eps, layer.weight, layer.bias = batch_norm.eps, batch_norm.weight, batch_norm.bias
    return layer


def _norm(groups: int) -> Any:
    """Return a function that creates the normalisation layer for a number of channels."""
    groups = check_count("groups", groups)
    return partial(_group_norm, groups)


def _group_norm(groups: int, channels: int) -> nn.GroupNorm:
    return nn.GroupNorm(math.gcd(groups, channels), channels)


def _torchvision(name: str, channels: int, classes: int, groups: int, stem: str) -> nn.Module:
    """Build a ResNet of torchvision with GroupNorm, for any number of input channels."""
    from torchvision.models import get_model

    if stem not in ("cifar", "imagenet"):
        raise ConfigError(f"unknown stem {stem!r}; known: cifar, imagenet")
    model = get_model(name, weights=None, num_classes=classes, norm_layer=_norm(groups))
    if stem == "cifar":
        model.conv1 = nn.Conv2d(channels, 64, 3, padding=1, bias=False)
        model.maxpool = nn.Identity()
    else:
        model.conv1 = nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False)
    nn.init.kaiming_normal_(model.conv1.weight, mode="fan_out", nonlinearity="relu")
    return _without_inplace(model)


def _without_inplace(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, nn.ReLU):
            module.inplace = False
    return model
