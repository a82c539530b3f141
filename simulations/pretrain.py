"""Pretraining of the public base of a text recipe, on docstrings of installed packages or on your
own texts.
"""

from __future__ import annotations

import ast
import math
import sysconfig
import warnings
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TypedDict

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fedlgm.checks import check_count
from fedlgm.data.text import encode
from fedlgm.errors import ConfigError, DataError
from fedlgm.files import PUBLIC, explain_failure, path_of, replacing
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.training import models
from fedlgm.training.devices import torch_threads
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe

_PACKAGES = ("torch", "scipy", "numpy", "sklearn", "sympy", "networkx", "pandas")
"""Packages in addition to Python's library. All of them are installed with fedlgm, and missing
packages are left out.
"""
_CHARACTERS = 6_000_000
_BATCH, _LR = 64, 3e-3


class Pretrained(TypedDict):
    """A pretrained base: file, SHA-256, characters of text, steps, and the mean loss of the last
    tenth of the steps.

    Example:
        >>> Pretrained(file="base.safetensors", sha256="", characters=6, steps=1, loss=4.1)["steps"]
        1
    """

    file: str
    sha256: str
    characters: int
    steps: int
    loss: float


def docstrings(characters: int = _CHARACTERS) -> np.ndarray:
    """Docstrings of Python's library and of installed packages, as the text data sets encode them.

    The texts depend only on the installed versions.

    Args:
        characters: largest number of characters.

    Returns:
        int64 [characters].
    """
    parts: list[np.ndarray] = []
    left = characters
    for text in _docstrings():
        tokens = encode(text + "\n")[:left]
        parts.append(tokens)
        left -= len(tokens)
        if left == 0:
            break
    return np.concatenate(parts)


def _docstrings() -> Iterator[str]:
    roots = [Path(sysconfig.get_paths()["stdlib"])]
    specs = (find_spec(name) for name in _PACKAGES)
    roots += [
        Path(spec.submodule_search_locations[0])
        for spec in specs
        if spec and spec.submodule_search_locations
    ]
    for root in roots:
        for file in sorted(root.rglob("*.py")):
            if {"test", "tests", "site-packages"} & set(file.relative_to(root).parts):
                continue
            try:
                with warnings.catch_warnings():
                    # warnings about escapes in other people's strings
                    warnings.simplefilter("ignore")
                    tree = ast.parse(file.read_bytes())
            except (SyntaxError, ValueError):
                continue
            for node in ast.walk(tree):
                if isinstance(
                    node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
                ):
                    text = ast.get_docstring(node)
                    if text:
                        yield text


def pretrain(
    recipe: Recipe,
    out: Path | str | None = None,
    *,
    texts: Sequence[Path] = (),
    steps: int = 1500,
    progress: Callable[[int, float], None] | None = None,
) -> Pretrained:
    """Train the base of a recipe's model to predict the next character of public text, and write it
    to a file.

    The base is the recipe's model without its adapters. Training is not private, so give only
    public texts.

    Args:
        recipe: a recipe of the task "next-token" on the bundled alphabet.
        out: file to write; default: the recipe's `model.weights`.
        texts: UTF-8 files; default: docstrings of installed packages.
        steps: Adam steps with 64 windows each.
        progress: called with the number of steps and the mean loss, ten times.

    Raises:
        ConfigError: the recipe has another task or alphabet, there is no file to write, or `steps`
            is not at least 1.
        DataError: a text cannot be read, or all are too short.
    """
    check_count("steps", steps)
    named = out if out is not None else recipe.model.weights
    if named is None:
        raise ConfigError("pretrain: --out names no file, and the recipe has no model.weights")
    file = path_of("out", named)
    if file.is_dir() or not file.parent.is_dir():
        raise ConfigError(f"pretrain: {file} must be a file in an existing folder")
    if recipe.task.name != "next-token":
        raise ConfigError(
            "pretrain: text trains the task 'next-token', but the recipe's task is "
            f"{recipe.task.name!r}"
        )
    assembly = Assembly(recipe.with_values(model={"weights": None, "adapters": None}), planned=True)
    module, length = assembly.model.module().train(), int(assembly.data.outline.shape[0])
    try:
        said = [path_of("text", text).read_text(encoding="utf-8") for text in texts]
        text = np.concatenate([encode(passage) for passage in said]) if texts else docstrings()
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(explain_failure("pretrain: a text cannot be read", error)) from error
    if len(text) < 2 * length:
        raise DataError(
            f"pretrain: the texts hold {len(text)} known characters, but at least {2 * length} are "
            "needed"
        )
    with torch_threads(recipe.run.threads):
        loss = _train(module, torch.from_numpy(text), length, steps, recipe.run.seed or 0, progress)
    with replacing(file, PUBLIC, shared=True) as partial:
        save_file(module.state_dict(), partial)
    digest = models.digest_of_file(file)
    return {
        "file": str(file),
        "sha256": digest,
        "characters": len(text),
        "steps": steps,
        "loss": loss,
    }


def _train(
    module: nn.Module,
    text: Tensor,
    length: int,
    steps: int,
    seed: int,
    progress: Callable[[int, float], None] | None,
) -> float:
    """Adam with a cosine schedule; returns the mean loss of the last tenth of the steps."""
    generator = KeyRing.from_seed(seed).derive(b"pretrain").torch_generator(Purpose.MODEL)
    optimizer = torch.optim.Adam(module.parameters(), lr=_LR)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: 0.5 * (1 + math.cos(math.pi * step / steps))
    )
    total, every, mean = 0.0, max(1, steps // 10), math.nan
    for step in range(1, steps + 1):
        starts = torch.randint(len(text) - length, (_BATCH,), generator=generator)
        rows = text[starts[:, None] + torch.arange(length + 1)]
        loss = nn.functional.cross_entropy(
            module(rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten()
        )
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()
        total += float(loss.detach())
        if step % every == 0:
            mean, total = total / every, 0.0
            if progress is not None:
                progress(step, mean)
    return mean
