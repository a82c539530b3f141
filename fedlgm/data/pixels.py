"""Images that are stored as bytes and decoded to numbers on access, and the conversion of single
images to numbers.
"""

from __future__ import annotations

import struct
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
from typing_extensions import override

from fedlgm.errors import DataError
from fedlgm.files import explain_failure

_TO_FLOAT = 2.0 / 255.0


class Undecoded(ABC):
    """Inputs [n, ...] that become numbers in memory only when they are read."""

    @property
    @abstractmethod
    def shape(self) -> tuple[int, ...]:
        """Shape of the array of all inputs."""

    @abstractmethod
    def keep(self, rows: Any) -> Undecoded:
        """Return some of the inputs without decoding or reading them."""

    @abstractmethod
    def parts(self, name: str) -> dict[str, np.ndarray]:
        """Return arrays that describe the inputs, without decoding or reading the inputs. The names
        of the arrays begin with `name`.
        """

    @abstractmethod
    def __getitem__(self, rows: Any) -> np.ndarray:
        """Return the inputs `rows` as numbers."""

    def __len__(self) -> int:
        """Return the number of inputs."""
        return self.shape[0]


@dataclass(frozen=True)
class Pixels(Undecoded):
    """Images that are stored as bytes, with a table of the number for which each byte stands. They
    take a quarter of the memory of the same images as floats.

    Attributes:
        codes: the bytes of the images, uint8 [n, ...].
        values: the number for which each byte stands, float32 [256].

    Example:
        >>> images = Pixels.from_bytes(np.array([[0, 51], [102, 255]], dtype=np.uint8)).between(0.0, 1.0)
        >>> images[np.array([1])].astype(float).round(6).tolist(), images.shape
        ([[0.4, 1.0]], (2, 2))
    """

    codes: np.ndarray
    values: np.ndarray

    @classmethod
    def from_bytes(cls, codes: np.ndarray) -> Pixels:
        """Make images from bytes, of which 0 stands for -1 and 255 for 1."""
        values = np.arange(256).astype(np.float32)
        values *= _TO_FLOAT
        values -= 1.0
        return cls(codes, values)

    def between(self, low: float, high: float) -> Pixels:
        """Return the same images with their numbers rescaled from [-1, 1] to [low, high]."""
        return Pixels(self.codes, rescale(self.values, low, high))

    @override
    def keep(self, rows: Any) -> Pixels:
        """Return some of the images, still stored as bytes."""
        return Pixels(self.codes[rows], self.values)

    @override
    def parts(self, name: str) -> dict[str, np.ndarray]:
        return {name: self.codes, f"{name}:values": self.values}

    @override
    def __getitem__(self, rows: Any) -> np.ndarray:
        """Decode the images `rows` to numbers, float32 [rows, ...]."""
        return np.take(self.values, self.codes[rows])

    @property
    @override
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape


def rescale(x: np.ndarray, low: float, high: float) -> np.ndarray:
    """Rescale numbers from [-1, 1] to [low, high], as float32.

    Example:
        >>> rescale(np.array([-1, 1], dtype=np.float32), 0.0, 1.0).tolist()
        [0.0, 1.0]
    """
    start, half = np.float32(low), np.float32((high - low) / 2)
    result: np.ndarray = start + half * (np.asarray(x) + np.float32(1))
    return result


def fit_image(image: Any, size: int | None, channels: int) -> np.ndarray:
    """Convert an image of Pillow to float32 [channels, H, W] in [-1, 1].

    Args:
        image: a `PIL.Image.Image`.
        size: height and width of the result, to which the largest centred square is resized
            bilinearly. With None, the image is not resized.
        channels: 3 (RGB) or 1 (grey).

    Raises:
        DataError: see `upright`.
    """
    from PIL import Image, ImageOps

    image = upright(image, channels)
    if size is not None:
        image = ImageOps.fit(image, (size, size), Image.Resampling.BILINEAR)
    pixels = np.asarray(image, dtype=np.float32)
    return pixels.reshape(*pixels.shape[:2], channels).transpose(2, 0, 1) * np.float32(
        2 / 255
    ) - np.float32(1)


def upright(image: Any, channels: int) -> Any:
    """Convert an image of Pillow to 8 bits per channel, and rotate it as its EXIF data say.

    Grey images of 16 bits are scaled by 1/257, so that white stays white.

    Args:
        image: a `PIL.Image.Image`.
        channels: 3 (RGB) or 1 (grey).

    Raises:
        DataError: the image's mode does not define which values are black and white, as for floats
            and 32-bit integers.

    Example:
        >>> from PIL import Image
        >>> upright(Image.fromarray(np.array([[0, 65535]], dtype=np.uint16)), 1).getextrema()
        (0, 255)
    """
    from PIL import Image, ImageOps

    if image.mode in ("F", "I"):
        raise DataError(
            f"an image of Pillow's mode {image.mode!r} does not say which values are black and "
            "white: save it with 8 or 16 bits per channel, or pass its pixels as arrays"
        )
    if image.mode.startswith("I;16"):
        image.load()
        turned = ImageOps.exif_transpose(image)
        image = Image.fromarray(np.rint(np.asarray(turned) / 257).astype(np.uint8))
    else:
        image = ImageOps.exif_transpose(image)
    return image.convert("RGB" if channels == 3 else "L")


@contextmanager
def readable(what: str) -> Iterator[None]:
    """Turn the errors of an image that cannot be decoded in the block into a DataError that names
    the image.

    Args:
        what: description of the image, for the message.
    """
    from PIL import Image

    try:
        yield
    except DataError as error:
        raise DataError(f"{what}: {error}") from error
    except Image.DecompressionBombError as error:
        raise DataError(
            f"{what} is too large an image to decode: save it with fewer pixels ({error})"
        ) from error
    except (OSError, ValueError, SyntaxError, struct.error) as error:
        raise DataError(explain_failure(f"{what} is not a readable image", error)) from error
