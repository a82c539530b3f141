"""Auxiliary queries: small vectors, mostly computed from layer norms, that are released together
with the layers.

A query is one object that holds its name, its size, the l2 bound of one unit's contribution, the
encoding of this contribution and the decoding of a released mean. A plan adds only the noise scale
to a query, so the plan's bound is always the query's bound. Contributions are also clipped to the
bound before they are added to a sum. The unit is the unit of the layers' bounds: a client or, if
the trainer bounds examples, an example.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
from typing_extensions import override

from fedlgm.checks import check_at_least_zero, check_share
from fedlgm.errors import ConfigError, PrivacyError
from fedlgm.extension.loader import is_bundled, sealed
from fedlgm.extension.per_row import rows_apart
from fedlgm.extension.registration import registers
from fedlgm.extension.registry import Registry
from fedlgm.libraries import Tensor, torch
from fedlgm.planning.layers import SAFETY, LayerTable


@dataclass(frozen=True)
class AuxiliaryQuery(ABC):
    """A question that is answered with a vector for each client (or example). The noisy mean of the
    answers is released in the same round as the layers.

    Attributes:
        sizes: public sizes d_j of the layers, [K].
        of_data: whether clients answer the query from their data instead of their update's norms.
            If so, `encode` gives the answer of clients that abstain.

    Example:
        >>> class CutLength(AuxiliaryQuery):
        ...     name, size, bound = "cut-length", 1, 1.0
        ...
        ...     def encode(self, norms, clip):
        ...         return torch.linalg.vector_norm(norms, dim=1, keepdim=True)
        ...
        ...     def decode(self, mean):
        ...         return mean.double().numpy()
        >>> norms = torch.tensor([[0.3, 0.4], [3.0, 4.0]])
        >>> CutLength((5, 2)).contribution(norms, torch.ones(2)).round(decimals=3).tolist()
        [[0.5], [1.0]]
    """

    name: ClassVar[str]
    of_data: ClassVar[bool] = False

    sizes: tuple[int, ...]

    def __init_subclass__(cls) -> None:
        if "contribution" in vars(cls):
            raise ConfigError(
                f"query {cls.__name__}: contribution bounds what encode returns, row by row: "
                "override encode instead"
            )

    @property
    def size(self) -> int:
        """Number of coordinates: one per layer, unless a query overrides this property."""
        return len(self.sizes)

    @property
    @abstractmethod
    def bound(self) -> float:
        """l2 bound of one client's contribution."""

    @abstractmethod
    def encode(self, norms: Tensor, clip: Tensor) -> Tensor:
        """Contributions of b clients, [b, size], from their layer norms before clipping [b, K] and
        the bounds [K].
        """

    @abstractmethod
    def decode(self, mean: Tensor) -> np.ndarray:
        """The estimate that follows from a released, noisy mean [size], float64."""

    def contribution(self, norms: Tensor, clip: Tensor) -> Tensor:
        """The contributions that a plan would sum, with the query's present size and bound."""
        return NoisyQuery(self, 0.0).contribution(norms, clip)


@sealed
@dataclass(frozen=True)
class NoisyQuery:
    """An auxiliary query with the scale of its noise, as plans contain it.

    The query's size and bound are read once and stored, because a user's query could change them
    after the charge.

    Attributes:
        query: the released query.
        sigma: noise std of the sum (of each client's contribution under local trust).
        size: number of coordinates of the query.
        bound: l2 bound of the query.

    Raises:
        ConfigError: noise or bound is negative or NaN.

    Example:
        >>> noisy = NoisyQuery(BelowBound((5, 2)), sigma=2.0)
        >>> round(noisy.sigma / noisy.bound, 3)  # the noise multiplier of the query alone
        2.828
    """

    query: AuxiliaryQuery
    sigma: float
    size: int = field(init=False)
    bound: float = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", int(self.query.size))
        object.__setattr__(self, "bound", float(self.query.bound))
        check_at_least_zero(f"query {self.query.name!r}", sigma=self.sigma, bound=self.bound)

    def contribution(self, norms: Tensor, clip: Tensor, given: Tensor | None = None) -> Tensor:
        """The results of the query's `encode`, clipped to `bound`, float32 [b, size]; numbers that
        are not finite count as zero.

        A user's query encodes one row at a time, so that no row can change the answer of another
        row.

        Args:
            norms: see `AuxiliaryQuery.encode`.
            clip: see `AuxiliaryQuery.encode`.
            given: answers of the clients [b, size], which replace the result of `encode`; see
                `fedlgm.aggregation.contributions.AnsweredUpdates`.

        Raises:
            ConfigError: answers have another shape.
            PrivacyError: a user's `encode` keeps information about other rows.
        """
        if given is not None:
            values = self._check_shape(given, norms)
        elif is_bundled(self.query) or not len(norms):
            values = self._encode(self.query, norms, clip)
        else:
            what = f"query {self.query.name!r}"
            values = rows_apart(
                self.query, lambda query, row: self._encode(query, row, clip.clone()), norms, what
            )
        # Lengths are measured only after this, because a row with a NaN has no length.
        values = torch.nan_to_num(values.float(), nan=0.0, posinf=0.0, neginf=0.0)
        largest = values.abs().amax(dim=1, keepdim=True).clamp(min=torch.finfo(torch.float32).tiny)
        wide = (values / largest).to(
            torch.float32 if values.device.type == "mps" else torch.float64
        )
        length = torch.linalg.vector_norm(wide, dim=1, keepdim=True) * largest
        cut = torch.where(
            length > self.bound, SAFETY * self.bound / length, torch.ones_like(length)
        )
        return (values * cut).float()

    def _encode(self, query: AuxiliaryQuery, norms: Tensor, clip: Tensor) -> Tensor:
        return self._check_shape(query.encode(norms, clip), norms)

    def _check_shape(self, values: Tensor, norms: Tensor) -> Tensor:
        if values.shape != (len(norms), self.size):
            raise ConfigError(
                f"query {self.query.name!r} encodes {tuple(values.shape)} for {len(norms)} x "
                f"{self.size}"
            )
        return values


def beside_layers(
    kind: type[AuxiliaryQuery], layers: LayerTable, multiplier: float, share: float
) -> tuple[tuple[NoisyQuery], float]:
    """Make a query that takes a share of a release's budget, and compute the noise multiplier that
    remains for the layers.

    Args:
        kind: class of the query.
        layers: the model's layers.
        multiplier: noise multiplier of the release as a whole.
        share: the query's share of the budget, in (0, 1).

    Raises:
        ConfigError: the multiplier is negative, or the share is out of range.

    Example:
        >>> ((noisy,), rest) = beside_layers(BelowBound, LayerTable.from_sizes({"a": 5, "b": 2}), 2.0, share=0.36)
        >>> round((noisy.bound / noisy.sigma) ** 2 + rest**-2, 9)  # 1 / 2^2, for both together
        0.25
    """
    check_at_least_zero(multiplier=multiplier)
    check_share(share=share)
    query = kind(tuple(layers.sizes.tolist()))
    return (
        NoisyQuery(query, query.bound * multiplier / math.sqrt(share)),
    ), multiplier / math.sqrt(1 - share)


class _LayerBits(AuxiliaryQuery):
    """One bit for each layer, shifted by -1/2 so that it is -1/2 or 1/2."""

    @property
    def bound(self) -> float:
        """sqrt(K) / 2, because every bit is 1/2 in magnitude."""
        return math.sqrt(len(self.sizes)) / 2

    def decode(self, mean: Tensor) -> np.ndarray:
        """Noisy share of clients (or examples) whose bit is 1/2, layer by layer, float64 [K]."""
        return np.asarray(mean.double().numpy() + 0.5)


@dataclass(frozen=True)
class BelowBound(_LayerBits):
    """Bits that are set for the layers in which a client's norm is within the bound.

    Source: Andrew et al. 2021, "Differentially private learning with adaptive clipping", applied to
        each layer.

    Example:
        >>> query = BelowBound((5, 2))
        >>> query.encode(torch.tensor([[0.5, 3.0]]), torch.tensor([1.0, 1.0])).tolist()
        [[0.5, -0.5]]
        >>> query.decode(torch.tensor([0.25, -0.5])).tolist()
        [0.75, 0.0]
    """

    name: ClassVar[str] = "below-bound"

    @override
    def encode(self, norms: Tensor, clip: Tensor) -> Tensor:
        return (norms <= clip).to(norms.dtype) - 0.5


@dataclass(frozen=True)
class BelowShare(_LayerBits):
    """Bits that are set for layers whose norm, divided by the norm of the client's whole update, is
    at most the layer's bound, divided by the norm of all bounds.

    Unlike the bits of `BelowBound`, these bits still distinguish layers if every layer's norm
    exceeds its bound.

    Example:
        >>> BelowShare((5, 2)).encode(torch.tensor([[3.0, 4.0]]), torch.tensor([1.0, 1.0])).tolist()
        [[0.5, -0.5]]
    """

    name: ClassVar[str] = "below-share"

    @override
    def encode(self, norms: Tensor, clip: Tensor) -> Tensor:
        return (layer_directions(norms) <= clip / torch.linalg.vector_norm(clip)).to(
            norms.dtype
        ) - 0.5


@dataclass(frozen=True)
class LayerVote(AuxiliaryQuery):
    """A client's vote for the quarter of the layers in which its update is longest. The vote has k
    ones, where k is K / 4 rounded up.

    Source: private choice of layers as in DP-SAPF (arXiv 2605.30312), with clients as the voters.

    Example:
        >>> vote = LayerVote((5, 2, 5, 2, 5))
        >>> vote.encode(torch.tensor([[3.0, 0.1, 4.0, 0.0, 1.0]]), torch.ones(5)).tolist(), round(vote.bound, 3)
        ([[1.0, 0.0, 1.0, 0.0, 0.0]], 1.414)
    """

    name: ClassVar[str] = "layer-vote"

    @property
    def votes(self) -> int:
        """Number k of layers that a client votes for."""
        return -(-len(self.sizes) // 4)

    @property
    def bound(self) -> float:
        """sqrt(k)."""
        return math.sqrt(self.votes)

    @override
    def encode(self, norms: Tensor, clip: Tensor) -> Tensor:
        """Of layers with equal norms, the first gets the vote. A row of zeros has no vote."""
        order = torch.sort(norms, dim=1, descending=True, stable=True).indices[:, : self.votes]
        cast = norms.isfinite().all(dim=1, keepdim=True) & (norms > 0)
        return torch.zeros_like(norms).scatter_(1, order, 1.0) * cast

    def decode(self, mean: Tensor) -> np.ndarray:
        """Noisy share of clients that voted for each layer, float64 [K]."""
        return mean.double().numpy()


@dataclass(frozen=True)
class LayerStrength(AuxiliaryQuery):
    """Each layer's share of a gradient's norm, (||g_l|| / ||g||)_l, a vector of norm 1 or 0.

    Algorithm 1 of the LM-DP-SGD paper averages the ratio ||g_l|| / min(C, ||g||) over a batch. For
    clipped gradients this ratio is unbounded. For all other gradients this query equals the ratio.
    The query is always bounded, without clipping.

    Example:
        >>> LayerStrength((5, 2)).encode(torch.tensor([[3.0, 4.0]]), torch.ones(2)).numpy().round(3)
        array([[0.6, 0.8]], dtype=float32)
    """

    name: ClassVar[str] = "layer-strength"

    @property
    def bound(self) -> float:
        """1, whatever the norms of the layers are."""
        return 1.0

    @override
    def encode(self, norms: Tensor, clip: Tensor) -> Tensor:
        return SAFETY * layer_directions(norms)

    def decode(self, mean: Tensor) -> np.ndarray:
        """Released mean of each layer's share, at least 0, float64 [K]."""
        return np.maximum(mean.double().numpy(), 0.0)


@dataclass(frozen=True)
class CutVote(AuxiliaryQuery):
    """A client's vote between two cuts of its update: 1/2 for water-filling, -1/2 for flat
    clipping.

    Norms do not determine which cut lowers the client's loss more, so clients compare losses
    (`clients.cut_vote.CutVotes`). A client abstains with 0 if it cannot evaluate its loss, or if
    both cuts give equal updates.

    Example:
        >>> query = CutVote((5,))
        >>> query.encode(torch.tensor([[3.0]]), torch.tensor([1.0])).tolist()
        [[0.0]]
        >>> query.decode(torch.tensor([0.25])).tolist()
        [0.75]
    """

    name: ClassVar[str] = "cut-vote"
    of_data: ClassVar[bool] = True

    @property
    def size(self) -> int:
        """1, because a vote is one number."""
        return 1

    @property
    def bound(self) -> float:
        """1/2, the magnitude of a vote."""
        return 0.5

    def encode(self, norms: Tensor, clip: Tensor) -> Tensor:
        """The answer of clients that abstain, which is 0."""
        return norms.new_zeros(len(norms), 1)

    def decode(self, mean: Tensor) -> np.ndarray:
        """Noisy share of clients that prefer water-filling, float64 [1]; abstaining clients count
        as half.
        """
        return np.asarray(mean.double().numpy() + 0.5)


def layer_directions(norms: Tensor) -> Tensor:
    """Rows of layer norms [n, K] as unit vectors; 0 where all norms are 0 or a norm is not finite.

    >>> layer_directions(torch.tensor([[3.0, 4.0], [0.0, 0.0], [1.0, math.nan]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.0, 0.0], [0.0, 0.0]]
    """
    largest = norms.amax(dim=1, keepdim=True)
    usable = norms.isfinite().all(dim=1, keepdim=True) & (largest > 0)
    # this division comes first, because squares of tiny numbers vanish
    part = torch.where(usable, norms / torch.where(usable, largest, 1.0), 0.0)
    length = torch.linalg.vector_norm(part, dim=1, keepdim=True)
    return part / length.clamp(min=1.0)  # a usable row has a length of at least 1


_KINDS: Registry[type[AuxiliaryQuery]] = Registry(
    "query",
    {kind.name: kind for kind in (BelowBound, BelowShare, LayerVote, LayerStrength, CutVote)},
)


@registers
def register(kind: type[AuxiliaryQuery]) -> type[AuxiliaryQuery]:
    """Register a user's query under its name for the clients of a run. This function can be used as
    a class decorator.

    Raises:
        ConfigError: another query already has the name.

    Example:
        >>> register(BelowBound) is BelowBound  # the same class again is not a conflict
        True
    """
    _KINDS.add(kind.name, kind)
    return kind


def require_registered(query: AuxiliaryQuery, sizes: Iterable[int]) -> None:
    """Refuse a query that clients would confuse with another query, because clients make queries
    from their names.

    Raises:
        PrivacyError: the name belongs to another query, or the query's sizes or options differ from
            those of the registered query.
    """
    if query.name in _KINDS and get(query.name, sizes) != query:
        raise PrivacyError(
            f"query {query.name!r} differs from the query that clients answer under this name, and "
            "the bounds may differ: give it a separate name, register its class, and derive it "
            "only from the layers' sizes"
        )


def get(name: str, sizes: Iterable[int]) -> AuxiliaryQuery:
    """The query `name` for layers of these sizes.

    Raises:
        ConfigError: there is no such query.

    Example:
        >>> get("below-bound", [5, 2, 7, 1]).bound
        1.0
    """
    if name not in _KINDS:
        raise ConfigError(
            f"unknown auxiliary query {name!r}; known: {', '.join(_KINDS.names())}; clients make a query "
            "from its name, so register your own in the module that defines it: "
            "fedlgm.queries.register(ITS_CLASS)"
        )
    query: AuxiliaryQuery = _KINDS.find(name)(tuple(int(size) for size in sizes))
    return query
