"""Images held as bytes and decoded to numbers on access."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

_TO_FLOAT = 2.0 / 255.0


@dataclass(frozen=True)
class Pixels:
    """Bytes and a table with the number for each byte: the same floats in a quarter of their memory.

    Attributes:
        codes: uint8 [n, ...].
        values: float32 [256].

    Example:
        >>> images = Pixels.scaled(np.array([[0, 51], [102, 255]], dtype=np.uint8)).between(0.0, 1.0)
        >>> images[np.array([1])].astype(float).round(6).tolist(), images.shape
        ([[0.4, 1.0]], (2, 2))
    """

    codes: np.ndarray
    values: np.ndarray

    @classmethod
    def scaled(cls, codes: np.ndarray) -> Pixels:
        """Bytes that stand for numbers from -1 to 1."""
        values = np.arange(256).astype(np.float32)
        values *= _TO_FLOAT
        values -= 1.0
        return cls(codes, values)

    def between(self, low: float, high: float) -> Pixels:
        """The same bytes, with numbers rescaled from [-1, 1] to [low, high]."""
        return Pixels(self.codes, moved(self.values, low, high))

    def keep(self, rows: Any) -> Pixels:
        """Some of the images, still as bytes."""
        return Pixels(self.codes[rows], self.values)

    def __getitem__(self, rows: Any) -> np.ndarray:
        """Images `rows` as numbers, float32 [rows, ...]."""
        return np.take(self.values, self.codes[rows])

    def __len__(self) -> int:
        """Number of images."""
        return len(self.codes)

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of all images."""
        return self.codes.shape


def moved(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Numbers rescaled from [-1, 1] to [low, high], float32.

    Example:
        >>> moved(np.array([-1, 1], dtype=np.float32), 0.0, 1.0).tolist()
        [0.0, 1.0]
    """
    start, half = np.float32(low), np.float32((high - low) / 2)
    result: np.ndarray = start + half * (np.asarray(x) + np.float32(1))
    return result


def fitted(image: Any, size: int | None, channels: int) -> np.ndarray:
    """An image of Pillow as float32 [channels, H, W] in [-1, 1].

    Args:
        image: a `PIL.Image.Image`.
        size: height and width; the largest centred square is resized bilinearly. None keeps the image's own.
        channels: 3 (RGB) or 1 (grey).
    """
    from PIL import Image, ImageOps

    image = image.convert("RGB" if channels == 3 else "L")
    if size is not None:
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32)
    return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1) * np.float32(2 / 255) - np.float32(1)
