"""Small convolutional networks from the papers' experiments."""

from __future__ import annotations

from collections import OrderedDict

import torch
from torch import nn

from fedlgm.errors import ConfigError
from fedlgm.training.devices import torch_threads
from fedlgm.training.models.activations import activation as activation_named


def cnn(in_shape: tuple[int, int, int], classes: int, *, activation: str = "tanh") -> nn.Module:
    """MNIST network of Papernot et al. (AAAI 2021), as in the code of Tramer and Boneh (ICLR 2021).

    Conv 16 8x8 stride 2 pad 2, MaxPool 2 stride 1, Conv 32 4x4 stride 2, MaxPool 2 stride 1, FC 32,
    FC classes: 26,010 parameters for 1x28x28 and 10 classes, in layers of 1,040, 8,224, 16,416 and
    330.

    Args:
        in_shape: shape (C, H, W) of one input.
        classes: number of outputs.
        activation: "tanh" (the source), "sigmoid" (the network of the SNR-consistent paper) or
            "relu".

    Returns:
        The model.

    Raises:
        ConfigError: the activation is unknown, or the input is too small.
    """
    features = OrderedDict(
        conv1=nn.Conv2d(in_shape[0], 16, 8, stride=2, padding=2),
        act1=activation_named(activation),
        pool1=nn.MaxPool2d(2, stride=1),
        conv2=nn.Conv2d(16, 32, 4, stride=2),
        act2=activation_named(activation),
        pool2=nn.MaxPool2d(2, stride=1),
    )
    return _with_head("cnn", features, in_shape, 32, classes, activation)


def cifar_cnn(
    in_shape: tuple[int, int, int], classes: int, *, activation: str = "tanh"
) -> nn.Module:
    """CIFAR-10 network of Tramer and Boneh (ICLR 2021).

    Three times (Conv, Conv, MaxPool 2) with 32, 64 and 128 channels, where all convolutions are 3x3
    with pad 1; then FC 128 and FC classes: 550,570 parameters for 3x32x32 and 10 classes.

    Args:
        in_shape: shape (C, H, W) of one input.
        classes: number of outputs.
        activation: "tanh" (the source), "sigmoid" or "relu".

    Returns:
        The model.

    Raises:
        ConfigError: the activation is unknown, or the input is too small.
    """
    features: OrderedDict[str, nn.Module] = OrderedDict()
    before = in_shape[0]
    for block, channels in enumerate((32, 64, 128), start=1):
        for i in (2 * block - 1, 2 * block):
            features[f"conv{i}"] = nn.Conv2d(before, channels, 3, padding=1)
            features[f"act{i}"] = activation_named(activation)
            before = channels
        features[f"pool{block}"] = nn.MaxPool2d(2)
    return _with_head("cifar-cnn", features, in_shape, 128, classes, activation)


def d_cnn(in_shape: tuple[int, int, int], classes: int, *, activation: str = "tanh") -> nn.Module:
    """D-CNN: CIFAR-10 network of Papernot et al. (AAAI 2021), eight convolutions and no fully
    connected layer.

    Three times (Conv, Conv, AvgPool 2) of 32, 64 and 128 channels, Conv 256, Conv classes, mean
    over the positions, with all convolutions 3x3 with pad 1: 605,226 parameters for 3x32x32 and 10
    classes. The published figures of this network belong to the same layers. The LM-DP-SGD paper
    calls this network "12-layer Deep-CNN".

    Args:
        in_shape: shape (C, H, W) of one input.
        classes: number of outputs.
        activation: "tanh" (the source), "sigmoid" or "relu".

    Returns:
        The model.

    Raises:
        ConfigError: the activation is unknown, or the input is too small.
    """
    if min(in_shape[1:]) < 8:
        raise ConfigError(
            f"model 'd-cnn' cannot take inputs of shape {in_shape}: they are too small"
        )
    layers: OrderedDict[str, nn.Module] = OrderedDict()
    before = in_shape[0]
    for i, channels in enumerate((32, 32, 64, 64, 128, 128, 256), start=1):
        layers[f"conv{i}"] = nn.Conv2d(before, channels, 3, padding=1)
        layers[f"act{i}"] = activation_named(activation)
        if i in (2, 4, 6):
            layers[f"pool{i // 2}"] = nn.AvgPool2d(2)
        before = channels
    layers["conv8"] = nn.Conv2d(before, classes, 3, padding=1)
    layers["mean"] = nn.AdaptiveAvgPool2d(1)
    layers["flatten"] = nn.Flatten()
    return nn.Sequential(layers)


def cnn_small(
    in_shape: tuple[int, int, int], classes: int, *, activation: str = "relu"
) -> nn.Module:
    """Stand-in for the unspecified "CNN" of the LaDP-FL paper (Tables I to VII).

    Conv 32 3x3, MaxPool 2, Conv 64 3x3, MaxPool 2, AvgPool 2 (with partial windows), FC 128, FC
    classes: 94,538 parameters for CIFAR-10, 106,148 for CIFAR-100, 100,670 for FEMNIST.

    The paper does not describe the layers, but it reports the norms of the noise of Full DP. This
    noise has the same standard deviation for all parameters of all models. The squared ratio of the
    noise norms of two models is therefore the ratio of the models' sizes, and the size of one of
    them, a ResNet-18, is known. From four budgets for each data set, Table VII implies 79,825 to
    105,850 parameters on CIFAR-10 (mean 94,718) and 104,206 to 108,721 on CIFAR-100 (mean 105,835).
    The difference between the means is about the number of parameters that 90 more outputs on 128
    hidden units need. The layers used here are those of a common network of this size with two
    convolutions. Whether the authors used the same layers is not known.

    Args:
        in_shape: shape (C, H, W) of one input.
        classes: number of outputs.
        activation: "relu", "tanh" or "sigmoid".

    Returns:
        The model.

    Raises:
        ConfigError: the activation is unknown, or the input is too small.
    """
    features = OrderedDict(
        conv1=nn.Conv2d(in_shape[0], 32, 3),
        act1=activation_named(activation),
        pool1=nn.MaxPool2d(2),
        conv2=nn.Conv2d(32, 64, 3),
        act2=activation_named(activation),
        pool2=nn.MaxPool2d(2),
        pool3=nn.AvgPool2d(2, ceil_mode=True),
    )
    return _with_head("cnn-small", features, in_shape, 128, classes, activation)


def _with_head(
    name: str,
    features: OrderedDict[str, nn.Module],
    in_shape: tuple[int, int, int],
    hidden: int,
    classes: int,
    activation: str,
) -> nn.Module:
    """Append flattening, a linear layer of width `hidden`, an activation and a linear layer of
    width `classes` to convolutional features.
    """
    try:
        with torch.no_grad(), torch_threads(1):  # a second thread would start more slowly than this
            flat = nn.Sequential(features)(torch.zeros(1, *in_shape)).numel()
    except RuntimeError as error:
        raise ConfigError(
            f"model {name!r} cannot take inputs of shape {in_shape}: they are too small"
        ) from error
    layers = OrderedDict(
        features,
        flatten=nn.Flatten(),
        fc1=nn.Linear(flat, hidden),
        act_fc1=activation_named(activation),
        fc2=nn.Linear(hidden, classes),
    )
    return nn.Sequential(layers)
