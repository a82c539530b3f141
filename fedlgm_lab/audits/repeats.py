"""Detection of repeated noise: sketches find it in the same place, windows find it moved or in another layer.

For independent Gaussian noise, the cosine of two sketches, and of a window with any part of the noise that does not
overlap it, has exactly a t law.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from fedlgm_lab.audits.correlations import normal_quantile
from fedlgm_lab.audits.scores import Array, Counts

Span = tuple[int, int]
_SKETCH, _SKETCHES = 256, 4096  # numbers of a layer's sketch, and of all sketches of a round
_WINDOW, _FEWEST = 64, 8  # numbers of a layer's window, at most and at least
_PLACES = 8192  # of a round's noise that windows are compared with
_WINDOWS = 2048  # of earlier rounds that are kept


def sketch_size(layers: int) -> int:
    """Largest size of one layer's sketch: 256, or fewer for models with many layers.

    Example:
        >>> sketch_size(4), sketch_size(64)
        (256, 64)
    """
    return min(_SKETCH, max(16, _SKETCHES // layers))


class Sketches:
    """Sums of a layer's noise with random signs, each of which is N(0, 1) if the noise is as planned.

    Args:
        sizes: d_j of the layers, [K].
        signs: random bytes, at least one bit per coordinate.
    """

    def __init__(self, sizes: Counts, signs: bytes) -> None:
        self._sizes, self.width = sizes, sketch_size(len(sizes))
        bits = np.unpackbits(np.frombuffer(signs, dtype=np.uint8), count=int(sizes.sum()))
        self._signs, self._ends = bits.astype(bool), np.concatenate([[0], np.cumsum(sizes)])

    def of(self, noise: Array, spans: dict[int, Span]) -> Array:
        """Sketch of each layer, [K, width]; NaN where there is none.

        Args:
            noise: noise of a round.
            spans: layer -> its start and end in `noise`.
        """
        found = np.full((len(self._sizes), self.width), np.nan)
        for j, (low, high) in spans.items():
            part = noise[low:high]
            times = len(part) // self.width
            if times < 2:
                found[j, : min(len(part), self.width)] = part[: self.width]
                continue
            used = times * self.width
            signs = self._signs[self._ends[j] : self._ends[j] + used]
            found[j] = np.where(signs, part[:used], -part[:used]).reshape(times, self.width).sum(axis=0)
            found[j] /= np.sqrt(times)
        return found


def compared(layers: int, rounds: int) -> int:
    """Number of pairs of sketches that are compared in a run."""
    return layers * rounds * (rounds - 1) // 2


def most_alike(sketches: Array) -> tuple[float, float, tuple[int, int, int]]:
    """(|z|, cosine, (layer, one round's index, the other's)) of the two most similar rounds in a layer.

    Args:
        sketches: [T, K, width], NaN where there is none.

    Example:
        >>> rows = np.random.default_rng(0).normal(size=(4, 1, 256))
        >>> rows[3] = rows[1]
        >>> z, cosine, where = most_alike(rows)
        >>> z > 20, round(cosine, 6), where
        (True, 1.0, (0, 1, 3))
    """
    best: tuple[float, float, tuple[int, int, int]] = (0.0, 0.0, (0, 0, 0))
    for j in range(sketches.shape[1] if len(sketches) > 1 else 0):
        known = ~np.isnan(sketches[:, j])
        at = np.flatnonzero(known.any(axis=1))
        size = int(known[at[0]].sum()) if len(at) else 0
        if len(at) < 2 or size < _FEWEST:
            continue
        rows = sketches[at, j, :size]
        rows = rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-300)
        cosines = np.triu(rows @ rows.T, 1)
        one, other = np.unravel_index(int(np.argmax(np.abs(cosines))), cosines.shape)
        value = float(cosines[one, other])
        z = abs(float(normal_quantile(np.array([value]), np.array([size]))[0]))
        if z > best[0]:
            best = z, value, (j, int(at[one]), int(at[other]))
    return best


class Windows:
    """The first numbers of every layer's noise, searched for anywhere in the noise of the same and later rounds.

    Windows find whole layers of noise that are repeated at another place (in large models, among a layer's first
    places) or in another layer, in the same round or a later one.
    """

    def __init__(self) -> None:
        self._kept: dict[int, Tensor] = {}  # window's length -> windows of earlier rounds, of length 1

    def of(self, noise: Array, spans: Sequence[Span]) -> Array:
        """(|z|, cosine, number of comparisons) of the most significant place of a round's noise.

        Args:
            noise: noise of the round.
            spans: start and end of each layer in it.
        """
        best, count = (0.0, 0.0), 0
        lengths = {span: min(_WINDOW, span[1] - span[0]) for span in spans}
        largest = np.abs(noise[np.isfinite(noise)]).max(initial=0.0) or 1.0
        scaled = noise / largest  # which no cosine sees, and single precision can hold
        for length in sorted({length for length in lengths.values() if length >= _FEWEST}):
            own = np.array([low for (low, _), size in lengths.items() if size == length])
            places = _places(spans, length)
            there = _directions(scaled, places, length)
            new = there[torch.from_numpy(np.searchsorted(places, own))]  # a layer's first place is one of them
            old = self._kept.get(length, torch.zeros(0, length))
            windows = torch.cat([old, new])
            cosines = windows @ there.T
            overlap = torch.from_numpy(np.abs(places[None, :] - own[:, None]) < length)
            cosines[len(old) :][overlap] = 0.0
            count += cosines.numel() - int(overlap.sum())
            least, most = (float(value) for value in cosines.aminmax())
            value = max(most, least, key=abs)
            z = abs(float(normal_quantile(np.array([value]), np.array([length]))[0]))
            best = max(best, (z, value))
            self._kept[length] = windows[-_WINDOWS:]
        return np.array([*best, max(count, 0)])


def _places(spans: Sequence[Span], length: int) -> Counts:
    """Starts of the parts that windows of a length are compared with: all, or the first ones of every layer."""
    most = max(1, _PLACES // max(1, len(spans)))
    starts = [np.arange(low, min(low + most, high - length + 1)) for low, high in spans if high - low >= length]
    return np.concatenate(starts) if starts else np.zeros(0, dtype=np.int64)


def _directions(noise: Array, starts: Counts, length: int) -> Tensor:
    """Parts of the noise from these places on, of length 1, float32 [n, length]; zeros where it is not known, or 0."""
    parts = np.lib.stride_tricks.sliding_window_view(noise, length)
    norms = np.sqrt(np.einsum("ij,ij->i", parts, parts))[starts]
    known = norms > 0  # false for NaN
    if not known.all():
        norms = np.where(known, norms, np.inf)
        noise = np.nan_to_num(noise)
    found = torch.from_numpy(noise).float().unfold(0, length, 1)[torch.from_numpy(starts)]
    return found.div_(torch.from_numpy(norms).float()[:, None])
