"""The scattering transform of images, whose features come from fixed wavelets without any training.

J. Bruna, S. Mallat: *Invariant Scattering Convolution Networks*, 2013, with the Morlet filters of
E. Oyallon, S. Mallat: *Deep Roto-Translation Scattering for Object Classification*, 2015.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch.nn import functional


@dataclass(frozen=True)
class Scattering:
    """Orders 0, 1 and 2 of the scattering transform.

    Attributes:
        side: height and width of the images, a multiple of 2^scales.
        scales: number of scales; height and width shrink by 2^scales.
        angles: number of angles.

    Example:
        >>> Scattering(8)(torch.ones(5, 3, 8, 8)).shape
        torch.Size([5, 243, 2, 2])
    """

    side: int
    scales: int = 2
    angles: int = 8

    @property
    def channels(self) -> int:
        """Number of features of an image's channel at one position."""
        pairs = self.scales * (self.scales - 1) // 2
        return 1 + self.angles * self.scales + self.angles**2 * pairs

    @property
    def _padded(self) -> int:
        return self.side + 2 * 2**self.scales

    @cached_property
    def _low(self) -> torch.Tensor:
        return self._filter(0.8 * 2 ** (self.scales - 1), 0.0, 0.0, 1.0)

    @cached_property
    def _wavelets(self) -> list[torch.Tensor]:
        """The filters of each scale, [angles, side, side], in Fourier space."""
        return [
            torch.stack([
                self._filter(
                    0.8 * 2**scale,
                    math.pi * angle / self.angles,
                    0.75 * math.pi / 2**scale,
                    4 / self.angles,
                )
                for angle in range(self.angles)
            ])
            for scale in range(self.scales)
        ]  # fmt: skip

    def _filter(self, width: float, angle: float, frequency: float, slant: float) -> torch.Tensor:
        """Compute a Gaussian, or a Morlet wavelet if the frequency is not 0, in Fourier space.

        A Morlet wavelet is a Gaussian times a wave, minus a multiple of the Gaussian such that its
        mean is 0.
        """
        gaussian, wave = torch.zeros(2, self._padded, self._padded, dtype=torch.complex128)
        near = torch.arange(self._padded, dtype=torch.float64)
        for shift in itertools.product(range(-2, 3), repeat=2):  # filters are periodic
            y, x = torch.meshgrid(*(near + self._padded * step for step in shift), indexing="ij")
            along = y * math.cos(angle) + x * math.sin(angle)
            across = x * math.cos(angle) - y * math.sin(angle)
            envelope = torch.exp(-(along**2 + (slant * across) ** 2) / (2 * width**2))
            gaussian += envelope
            wave += envelope * torch.exp(1j * frequency * along)
        if frequency:
            gaussian = wave - wave.sum() / gaussian.sum() * gaussian
        return (torch.fft.fft2(gaussian).real * slant / (2 * math.pi * width**2)).float()

    def __call__(self, images: torch.Tensor) -> torch.Tensor:
        """Compute the features of images.

        Args:
            images: [n, channels, side, side].

        Returns:
            [n, channels * self.channels, side / 2^scales, side / 2^scales].
        """
        padded = functional.pad(images, [2**self.scales] * 4, mode="reflect")
        waves = torch.fft.fft2(padded)[:, :, None]
        features, second = [self._smooth(waves, 0)], []
        for scale, wavelets in enumerate(self._wavelets):
            first = self._modulus(waves, wavelets, 0, scale)
            features.append(self._smooth(first, scale))
            for next_scale in range(scale + 1, self.scales):
                for wave in first.split(1, dim=2):
                    then = self._modulus(wave, self._wavelets[next_scale], scale, next_scale)
                    second.append(self._smooth(then, next_scale))
        return torch.cat([*features, *second], dim=2).flatten(1, 2)

    def _modulus(
        self, waves: torch.Tensor, wavelets: torch.Tensor, at: int, to: int
    ) -> torch.Tensor:
        """Compute the Fourier transform of the modulus of the wavelets' coefficients, at the
        resolution of scale `to`.
        """
        product = waves * _fold(wavelets, 2**at) * 4**at
        return torch.fft.fft2(torch.fft.ifft2(_fold(product, 2 ** (to - at))).abs())

    def _smooth(self, waves: torch.Tensor, at: int) -> torch.Tensor:
        """Compute local means at the resolution of the features, without the padded border."""
        product = waves * _fold(self._low, 2**at) * 4**at
        return torch.fft.ifft2(_fold(product, 2 ** (self.scales - at))).real[..., 1:-1, 1:-1]


def _fold(waves: torch.Tensor, factor: int) -> torch.Tensor:
    """Compute the Fourier transform of every `factor`-th value from the transform `waves` of all
    values; `factor` is a power of 2.
    """
    while factor > 1:
        side, factor = waves.shape[-1] // 2, factor // 2
        waves = waves[..., :side, :] + waves[..., side:, :]
        waves = (waves[..., :side] + waves[..., side:]) / 4
    return waves


def normalise_groups(features: torch.Tensor, groups: int) -> torch.Tensor:
    """Scale every example's features to mean 0 and variance 1 in each group of channels.

    The scale of an example depends only on this example, so the scaling has no privacy cost.

    Args:
        features: [n, channels, height, width].
        groups: number of groups, which divides the channels.
    """
    return functional.group_norm(features, groups)
