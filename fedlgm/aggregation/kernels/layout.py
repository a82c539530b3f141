"""Tables that cut the flat vector into pieces, each of which lies within one layer or consists of
whole layers.

The tables depend only on the public layer boundaries. They are built once on the host and stay on
the device, so a step needs one launch for all layers and no synchronisation.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np
import torch
from torch import Tensor

from fedlgm.errors import ConfigError

_LIMIT = 2**31  # an element's index within its layer is a signed 32-bit number in the kernels
_SMALL = 2048  # layers with fewer elements may share a segment
_MAX_ALIGNMENT = 16


@dataclass(frozen=True)
class Tiles:
    """Tiles of at most `size` elements, each within one layer, in flat order.

    Attributes:
        table: [T, 4] int64 on the device: layer, first element within the layer, number of
            elements, flat position.
        first: [K + 1] int64 on the device; layer k consists of the tiles first[k] <= t < first[k +
            1].
        count: the number T of tiles.
        alignment: power of two (at most 16) that divides every tile's flat position.
    """

    table: Tensor
    first: Tensor
    count: int
    alignment: int


@dataclass(frozen=True)
class Segment:
    """A range of the flat vector that the torch backend handles at once: part of one layer, or
    several small layers.

    Attributes:
        start: flat position of the first element.
        stop: flat position after the last element.
        layer: the layer, or the layer of each element, [stop - start] int64.
        group: first word of the Philox counter (element // 4), for the first group of four
            elements, or for all G groups, [G] int64.
        group_layer: second word of the counter: the layer, or the layer of each group, [G] int64.
        pick: index of each element's value among the 4 G outputs, [stop - start] int64; with None,
            the elements take the first outputs in order.
    """

    start: int
    stop: int
    layer: int | Tensor
    group: int | Tensor
    group_layer: int | Tensor
    pick: Tensor | None


class Layout:
    """Checked layer boundaries.

    Args:
        offsets: [K + 1] int64; layer k covers the flat positions offsets[k] <= i < offsets[k + 1].

    Raises:
        ConfigError: boundaries do not start at 0, or a layer is empty or has 2**31 elements or
            more.
    """

    def __init__(self, offsets: np.ndarray) -> None:
        sizes = np.diff(offsets)
        if len(sizes) < 1 or offsets[0] != 0 or (sizes < 1).any() or (sizes >= _LIMIT).any():
            raise ConfigError(
                "offsets must be [0, end of layer 1, ..., end of layer K], strictly increasing by "
                "less than 2**31, got "
                f"{offsets.tolist() if len(offsets) < 9 else [*offsets[:8].tolist(), '...']}"
            )
        self.offsets = offsets
        self.sizes = sizes
        self.layers = len(sizes)
        self.size = int(offsets[-1])
        self._tiles: dict[tuple[int, torch.device], Tiles] = {}
        self._segments: dict[tuple[int, torch.device], list[Segment]] = {}

    @cached_property
    def alignment(self) -> int:
        """Largest power of two, at most 16, that divides the position of every layer."""
        bits = int(np.bitwise_or.reduce(self.offsets[:-1])) | _MAX_ALIGNMENT
        return bits & -bits

    def tiles(self, size: int, device: torch.device) -> Tiles:
        """Return tiles of at most `size` elements (a multiple of 16) on `device`. Only the first
        call for a size and device copies a table to the device.
        """
        if (size, device) not in self._tiles:
            counts = -(-self.sizes // size)
            first = np.concatenate([[0], np.cumsum(counts)])
            layer = np.repeat(np.arange(self.layers), counts)
            start = (np.arange(first[-1]) - first[layer]) * size
            length = np.minimum(size, self.sizes[layer] - start)
            table = np.stack([layer, start, length, self.offsets[layer] + start], axis=1)
            self._tiles[size, device] = Tiles(
                torch.from_numpy(table).to(device),
                torch.from_numpy(first).to(device),
                int(first[-1]),
                self.alignment,
            )
        return self._tiles[size, device]

    def segments(self, size: int, device: torch.device) -> list[Segment]:
        """Return segments of at most `size` elements (a multiple of 4, at least 2048) on `device`,
        in flat order.
        """
        if (size, device) not in self._segments:
            segments: list[Segment] = []
            run: list[int] = []
            for layer in range(self.layers):
                small = int(self.sizes[layer]) < _SMALL
                if run and (not small or self.offsets[layer + 1] - self.offsets[run[0]] > size):
                    segments.append(self._merge(run, device))
                    run = []
                if small:
                    run.append(layer)
                else:
                    segments.extend(self._pieces(layer, size))
            if run:
                segments.append(self._merge(run, device))
            self._segments[size, device] = segments
        return self._segments[size, device]

    def _pieces(self, layer: int, size: int) -> list[Segment]:
        begin, end = int(self.offsets[layer]), int(self.offsets[layer + 1])
        starts = range(begin, end, size)
        return [
            Segment(s, min(s + size, end), layer, (s - begin) // 4, layer, None) for s in starts
        ]

    def _merge(self, run: list[int], device: torch.device) -> Segment:
        sizes = self.sizes[run]
        groups = -(-sizes // 4)
        layer_of_group = np.repeat(run, groups)
        group = np.concatenate([np.arange(n) for n in groups])
        base = 4 * (np.cumsum(groups) - groups)
        pick = np.concatenate([b + np.arange(n) for b, n in zip(base, sizes, strict=True)])

        def put(array: np.ndarray) -> Tensor:
            return torch.from_numpy(array).to(device)

        return Segment(
            int(self.offsets[run[0]]),
            int(self.offsets[run[-1] + 1]),
            put(np.repeat(run, sizes)),
            put(group),
            put(layer_of_group),
            put(pick),
        )


def empty_block(
    clients: int, size: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32
) -> Tensor:
    """Allocate a block of updates [clients, size] without setting its values. It is aligned for the
    kernels: every row begins at a multiple of 16 elements.
    """
    pitch = -(-size // _MAX_ALIGNMENT) * _MAX_ALIGNMENT
    return torch.empty(clients, pitch, device=device, dtype=dtype)[:, :size]


def align_rows(updates: Tensor) -> Tensor:
    """Return `updates` [B, D], or a copy in an `empty_block` if a row does not begin at a multiple
    of 16 elements.
    """
    bits = updates.data_ptr() // updates.element_size() | (
        updates.stride(0) if len(updates) > 1 else 0
    )
    if bits % _MAX_ALIGNMENT == 0:
        return updates
    clients, size = updates.shape
    return empty_block(clients, size, updates.device, updates.dtype).copy_(updates)


@lru_cache(maxsize=64)
def _layout(raw: bytes) -> Layout:
    return Layout(np.frombuffer(raw, dtype=np.int64))


def layout_of(offsets: Tensor) -> Layout:
    """Return the layout of layer boundaries, which is cached by their values.

    Args:
        offsets: [K + 1] int64 on the CPU.

    Raises:
        ConfigError: the offsets have another dtype, shape or device, or `Layout` refuses them.
    """
    if offsets.device.type != "cpu" or offsets.dtype != torch.int64 or offsets.ndim != 1:
        raise ConfigError(
            "offsets must be a 1-d int64 tensor on the CPU (layer boundaries are public host "
            f"data), got {offsets.dtype} {tuple(offsets.shape)} on {offsets.device}"
        )
    return _layout(offsets.numpy().tobytes())
