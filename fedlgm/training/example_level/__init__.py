"""Example-level privacy: sums of clipped per-example gradients."""

from fedlgm.planning.clipping import Scaling
from fedlgm.training.example_level.engine import ClippedSum, ExampleGradients
from fedlgm.training.example_level.one_batch import clipped_sum
from fedlgm.training.example_level.scaling import PSAC, AutoS, FlatClip, PerLayerClip, Reweighted

__all__ = [
    "PSAC",
    "AutoS",
    "ClippedSum",
    "ExampleGradients",
    "FlatClip",
    "PerLayerClip",
    "Reweighted",
    "Scaling",
    "clipped_sum",
]
