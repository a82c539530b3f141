"""Example-level privacy: sums of clipped per-example gradients."""

from fedlgm.clipping import Scaling
from fedlgm.example_level.engine import ClippedSum, ExampleGradients
from fedlgm.example_level.one_batch import clipped_sum
from fedlgm.example_level.scaling import PSAC, AutoS, FlatClip, PerLayerClip, Reweighted

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
