"""Low-rank adapters (LoRA; Hu et al., ICLR 2022) of linear layers, which need no other package.

Parameters have the same names as in `peft`, `lora_A` and `lora_B`, so layer groupings and the
export treat the adapters of both packages in the same way. A frozen base is not trained, noised or
sent.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from fedlgm.checks import check_known
from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.planning.layers import factor_of

Style = Literal["both", "ffa"]


class LowRank(nn.Module):
    """A linear layer W x + b with a trained low-rank addition: W x + b + (alpha / r) B A x.

    The initial values of A [r, in] are random and those of B [out, r] are zero, so the layer's
    outputs are unchanged at first. Source: Hu et al., 4.1.

    Args:
        base: the layer to adapt, which is frozen.
        rank: r, at least 1.
        alpha: scale of the addition; None means r.
        generator: random generator that draws A.

    Raises:
        ConfigError: the rank is below 1, or above the smaller of the layer's two widths.

    Example:
        >>> layer = LowRank(nn.Linear(6, 4), rank=2)
        >>> {name: tuple(p.shape) for name, p in layer.named_parameters() if p.requires_grad}
        {'lora_A.weight': (2, 6), 'lora_B.weight': (4, 2)}
    """

    def __init__(
        self,
        base: nn.Linear,
        rank: int,
        alpha: float | None = None,
        generator: torch.Generator | None = None,
    ) -> None:
        super().__init__()
        if not 1 <= rank <= min(base.in_features, base.out_features):
            raise ConfigError(
                f"rank {rank} of an adapter must lie between 1 and "
                f"{min(base.in_features, base.out_features)}, the smaller side of the layer that "
                "it adapts"
            )
        self.base = base.requires_grad_(False)
        self.lora_A = nn.Linear(base.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, base.out_features, bias=False)
        self.rank, self.alpha = rank, float(rank if alpha is None else alpha)
        if not self.lora_A.weight.is_meta:
            nn.init.kaiming_uniform_(self.lora_A.weight, a=5**0.5, generator=generator)
            nn.init.zeros_(self.lora_B.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Outputs [..., out] for inputs [..., in]."""
        added: Tensor = self.base(x) + self.alpha / self.rank * self.lora_B(self.lora_A(x))
        return added


def adapt(
    model: nn.Module,
    rank: int,
    targets: Sequence[str] | None = None,
    *,
    alpha: float | None = None,
    also: Sequence[str] = (),
    style: Style = "both",
    seed: int = 0,
) -> nn.Module:
    """Freeze a model and adapt its linear layers, in place.

    Args:
        model: any module.
        rank: rank of every adapter; 0 adds no adapter, and only `also` is trained.
        targets: suffixes of the names of the linear layers to adapt, such as ["query", "value"];
            None adapts all linear layers.
        alpha: see `LowRank`.
        also: suffixes of the names of further modules or parameters to train, such as a new output
            layer or "bias".
        style: "both" trains A and B; "ffa" freezes A at its initial value (FFA-LoRA; Sun et al.,
            ICLR 2024). The average of the clients' B then gives the exact average of their products
            B A, and uploads are about half as large.
        seed: public seed from which the initial A is drawn.

    Returns:
        The model.

    Raises:
        ConfigError: nothing is trained, a name matches nothing, or the style is unknown.

    Example:
        >>> model = adapt(nn.Sequential(nn.Linear(6, 4), nn.Tanh(), nn.Linear(4, 3)), 2, ["0"], also=["2"])
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['0.lora_A.weight', '0.lora_B.weight', '2.weight', '2.bias']
    """
    check_known("style", style, Style, "adapters")
    model.requires_grad_(False)
    module_names = [name for name, _ in model.named_modules() if name and _ends(name, also)]
    single = {name: parameter for name, parameter in model.named_parameters() if _ends(name, also)}
    linear = {
        name: child
        for name, child in model.named_modules()
        if rank
        and type(child) is nn.Linear
        and name not in module_names
        and (targets is None or _ends(name, targets))
    }
    for asked, names in (
        (targets or () if rank else (), list(linear)),
        (also, [*module_names, *single]),
    ):
        unmet = [end for end in asked if not any(_ends(name, [end]) for name in names)]
        if unmet:
            layers = ", ".join(
                name for name, child in model.named_modules() if type(child) is nn.Linear
            )
            raise ConfigError(
                f"adapters: no layer of the model has a name that ends in {unmet[0]!r}; linear "
                f"layers: {layers}"
            )
    if rank and not linear:
        raise ConfigError(f"adapters: {type(model).__name__} has no torch.nn.Linear to adapt")
    if not rank and not also:
        raise ConfigError(
            "adapters: rank = 0 adds no adapter, and `also` names nothing else to train"
        )
    generator = KeyRing.from_seed(seed).derive(b"adapters").torch_generator(Purpose.MODEL)
    for name, layer in linear.items():
        parent, _, leaf = name.rpartition(".")
        setattr(model.get_submodule(parent), leaf, LowRank(layer, rank, alpha, generator))
    for name in module_names:
        model.get_submodule(name).requires_grad_(True)
    for parameter in single.values():
        parameter.requires_grad_(True)
    return freeze_first_factors(model) if style == "ffa" else model


def freeze_first_factors(model: nn.Module) -> nn.Module:
    """Freeze, in place, the factor A of every adapter of `LowRank` or `peft`, as the style "ffa"
    does.

    Example:
        >>> model = freeze_first_factors(LowRank(nn.Linear(6, 4), rank=2))
        >>> [name for name, p in model.named_parameters() if p.requires_grad]
        ['lora_B.weight']
    """
    for name, parameter in model.named_parameters():
        if factor_of(name) == "A":
            parameter.requires_grad_(False)
    return model


def _ends(name: str, ends: Sequence[str]) -> bool:
    return any(name == end or name.endswith(f".{end}") for end in ends)
