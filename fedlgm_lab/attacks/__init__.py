"""Attacks that measure what a federation reveals: inversion, membership inference, class reconstruction.

Every attack states the knowledge of its attacker. The attacks measure leakage on simulations, where the private data
are available for comparison. A failed attack proves nothing; only an accountant gives an upper bound.
"""

from fedlgm_lab.attacks.frechet import PublicClassifier, frechet_distance
from fedlgm_lab.attacks.gan import ClassReconstruction, GanSettings
from fedlgm_lab.attacks.images import psnr, ssim
from fedlgm_lab.attacks.inception import InceptionFeatures
from fedlgm_lab.attacks.inversion import InversionSettings, Reconstruction, invert
from fedlgm_lab.attacks.lira import confidence_logits, likelihood_ratios, pooled, random_halves
from fedlgm_lab.attacks.membership import MembershipResult, evaluate_scores
from fedlgm_lab.attacks.mia import attack_outputs, output_scores
from fedlgm_lab.attacks.observation import Observation
from fedlgm_lab.attacks.rmia import relative_ratios

__all__ = [
    "ClassReconstruction",
    "GanSettings",
    "InceptionFeatures",
    "InversionSettings",
    "MembershipResult",
    "Observation",
    "PublicClassifier",
    "Reconstruction",
    "attack_outputs",
    "confidence_logits",
    "evaluate_scores",
    "frechet_distance",
    "invert",
    "likelihood_ratios",
    "output_scores",
    "pooled",
    "psnr",
    "random_halves",
    "relative_ratios",
    "ssim",
]
