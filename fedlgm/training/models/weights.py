"""Initial weights from a file, usually those of a public model that private training continues."""

from __future__ import annotations

import hashlib
from glob import glob
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn

from fedlgm.errors import ConfigError
from fedlgm.files import explain_failure, path_of
from fedlgm.planning.layers import factor_of
from fedlgm.training.models.huggingface import original
from fedlgm.wording import alternatives

_BASES = ("base", "base_layer")  # names under which `LowRank` and `peft` keep the adapted layer
_PEFT = "base_model.model."


def load_weights_(module: nn.Module, file: Path | str) -> nn.Module:
    """Load weights from a safetensors file into a module, in place.

    The file contains the tensors of the model, or of the base model without its adapters, under the
    names of `state_dict`. Adapters and buffers that the file lacks are left unchanged. All other
    tensors of the model must be in the file, and all tensors of the file must be in the model.

    Args:
        module: the model; for a model on the meta device, only names and shapes are compared.
        file: a file written by `fedlgm export` or `save_pretrained`, from training on public data.

    Returns:
        The module.

    Raises:
        ConfigError: the file does not exist or cannot be read, or its tensors differ from the
            model's in name or shape; the message names the first difference.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> file, model = tempfile.mkdtemp() + "/base.safetensors", nn.Linear(2, 3)
        >>> save_file(nn.Linear(2, 3).state_dict(), file)
        >>> load_weights_(model, file) is model
        True
    """
    try:
        stored = load_file(path_of("weights", file))
    except (OSError, SafetensorError) as error:
        why = (
            f"there is no file {file}"
            if not Path(file).exists()
            else f"{file} cannot be read as a safetensors file"
        )
        raise ConfigError(f"weights: {why}") from error
    inner = original(module)
    shared: dict[int, Tensor] = {}
    places = {_plain_name(name): value for name, value in inner.state_dict(keep_vars=True).items()}
    for name, tensor in stored.items():
        place = places.get(name)
        if place is None:
            names = [key for key in places if not factor_of(key)]
            raise ConfigError(
                f"weights: {file} holds {name!r}, which the model lacks; "
                f"{alternatives(name, names)}"
            )
        if place.shape != tensor.shape:
            raise ConfigError(
                f"weights: {name!r} has shape {tuple(tensor.shape)} in {file} and "
                f"{tuple(place.shape)} in the model"
            )
        shared[id(place)] = tensor
    for name, place in places.items():
        if id(place) not in shared and not factor_of(name) and isinstance(place, nn.Parameter):
            raise ConfigError(f"weights: {file} does not hold {name!r}, which the model has")
    with torch.no_grad():
        for place in places.values():
            if id(place) in shared and not place.is_meta:
                place.copy_(shared[id(place)])
    return module


def digest_of_file(file: Path | str) -> str:
    """Compute the SHA-256 of a file's bytes or, for a pattern such as "sites/*.csv", the SHA-256 of
    the digests of all matching files.

    Raises:
        ConfigError: the file cannot be read.
    """
    path = path_of("weights", file)
    if not path.exists() and (several := sorted(glob(str(path), recursive=True))):
        return hashlib.sha256("".join(map(digest_of_file, several)).encode()).hexdigest()
    try:
        with path.open("rb") as opened:
            return hashlib.file_digest(opened, "sha256").hexdigest()
    except OSError as error:
        raise ConfigError(explain_failure(f"weights: {file} cannot be read", error)) from error


def _plain_name(name: str) -> str:
    """A tensor's name in the model without adapters."""
    parts = name.removeprefix(_PEFT).split(".")
    return ".".join(
        part for i, part in enumerate(parts) if not (part in _BASES and i == len(parts) - 2)
    )
