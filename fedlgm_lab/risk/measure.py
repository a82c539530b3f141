"""Measures the layer risk of a recipe's architecture from public examples (Algorithm 2 of the
LM-DP-SGD paper).

>>> from simulations.config.recipe import load
>>> public: PublicExamples = public_examples(load("digits", ["risk.examples=60"]))
>>> public.source, public.x.shape
('the test examples of digits, which runs evaluate without protection', torch.Size([60, 1, 8, 8]))
>>> quick = ShadowTraining(epochs=1, adversary_epochs=1)
>>> found: Findings = measure(Model(name="logistic"), tasks.get(), public, quick, seed=1)
>>> len(found.rates("held-out")), round(found.standard_error, 3)
(1, 0.091)
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm import data
from fedlgm.errors import ConfigError
from fedlgm.extension.loader import is_object, is_reference
from fedlgm.mechanisms.lm_dp_sgd import check_risk, risk_weights
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm.training import models, tasks
from fedlgm.training.tasks import Task
from fedlgm.wording import prefix_key
from fedlgm_lab.risk.exposure import LayerRisk, ShadowTraining, layer_risk, public_bias_weights
from simulations.config.named_sections import Data, Model
from simulations.config.recipe import Recipe
from simulations.config.sections import Risk as RiskSection
from simulations.config.validation_messages import in_section
from simulations.progress import OnProgress

Errors = Literal["held-out", "training"]
_BIASED = 500  # largest number of public examples for the weights for convergence


@dataclass(frozen=True)
class PublicExamples:
    """Public examples on which layer risk is measured.

    Attributes:
        source: their origin, in words.
        x: inputs [N, ...].
        y: targets [N, ...].
        classes: number of outputs per example that a model needs for them.
    """

    source: str
    x: Tensor
    y: Tensor
    classes: int | None


@dataclass(frozen=True)
class Findings:
    """Layer risk of an architecture.

    Attributes:
        risks: layer risks, in the order of the layer table.
        public: origin of the public examples, in words.
        examples: number of examples.
        unseen: number of these examples from which the held-out errors are computed.
        bias_weights: public weights for convergence at the initial model, which can replace
            `strengths` (see `public_bias_weights`), [L].
    """

    risks: tuple[LayerRisk, ...]
    public: str
    examples: int
    unseen: int
    bias_weights: tuple[float, ...] = ()

    def rates(self, errors: Errors) -> list[float]:
        """Return the error rates on unseen examples or, as in the paper, on the adversaries'
        training sets, [L].
        """
        return [
            risk.training_error if errors == "training" else risk.held_out_error
            for risk in self.risks
        ]

    def weights(self, errors: Errors, emphasis: float) -> np.ndarray:
        """Compute the layer weights that `lm-dp-sgd` derives from the error rates, float64 [L].

        Raises:
            ConfigError: the emphasis r is below 1.
        """
        strengths = np.array([risk.strength for risk in self.risks])
        return risk_weights(strengths, self.rates(errors), emphasis)

    def to_dict(self) -> dict[str, Any]:
        """Convert the findings to values that JSON can hold, with the standard error."""
        return {
            "public": self.public,
            "examples": self.examples,
            "standard_error": self.standard_error,
            "layers": [asdict(risk) for risk in self.risks],
            "bias_weights": list(self.bias_weights),
        }

    @property
    def standard_error(self) -> float:
        """Standard error of a held-out error near one half."""
        return 0.5 / math.sqrt(self.unseen)


def public_examples(recipe: Recipe) -> PublicExamples:
    """Load the recipe's public examples. Private examples in the same files are read and dropped.

    Raises:
        FedlgmError: there is no such set, the recipe trains on it, or its examples are not single
            tensors.
    """
    section, private_name = recipe.risk or RiskSection(), recipe.data.name
    if section.data is None and is_object(private_name):
        raise ConfigError(
            "risk.data: name the public set, because the recipe's data were passed in Python"
        )
    if section.data is not None:
        _refuse_private(section, recipe.data)
    named = section.data or data.twin(private_name)
    folder, images = (section.dir, {}) if section.data else (recipe.data.dir, recipe.data.reading)
    if section.data == data.IMAGE_FOLDER:
        images = {
            key: value
            for key, value in recipe.data.reading.items()
            if key in ("image_size", "channels", "pixels")
        }
        images |= {} if section.attribute is None else {"attribute": section.attribute}
    elif (
        section.data is not None
        and recipe.data.pixels is not None
        and not is_reference(section.data)
    ):
        # a bundled set gets the interval of the model's pixels; a user's own set is not changed
        images = {"pixels": recipe.data.pixels}
    with prefix_key("risk.data" if named else "data"):
        dataset = recipe.task.build().prepare(data.load(named or private_name, folder, **images))
    if named is None:
        source, x, y = (
            f"the test examples of {private_name}, which runs evaluate without protection",
            dataset.test_x,
            dataset.test_y,
        )
    else:
        source, x, y = f"the training examples of {named}", dataset.train_x, dataset.train_y
    if isinstance(x, tuple):
        raise ConfigError("layer risk takes models of one input")
    if section.examples is not None:
        x, y = x[: section.examples], y[: section.examples]
    classes = recipe.task.build().outputs(dataset)
    return PublicExamples(source, torch.from_numpy(x), torch.from_numpy(y), classes)


def _refuse_private(section: RiskSection, private: Data) -> None:
    """Refuse a "public" set whose examples the recipe trains on."""
    named, private_name = str(section.data), private.name
    base = private_name.partition("/")[0]
    same = data.overlap(named, private_name)
    if same and private_name == data.IMAGE_FOLDER:
        same = Path(section.dir or "").resolve() == Path(private.dir or "").resolve()
    if same:
        raise ConfigError(
            f"risk.data: {named!r} holds examples that the recipe trains on ([data] is {private_name!r}), "
            f"which are private: use another set, train on {base}/private and measure on "
            f"{base}/public, or leave the key out to use the test examples"
        )


def input_shape(recipe: Recipe) -> tuple[int, ...]:
    """Return the shape of one of the recipe's inputs, which is read from the files unless the data
    set's name determines it.

    Example:
        >>> from simulations.config.recipe import load
        >>> input_shape(load("digits"))
        (1, 8, 8)
    """
    section = recipe.data
    dataset = data.outline(section.name, **section.reading) or data.load(
        section.name, section.dir, **section.reading
    )
    return dataset.shape


def resize(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Convert images [N, C, H, W] to another shape (C, H, W), by bilinear resizing and by
    conversion between grey and colour.

    Source: LM-DP-SGD paper, Appendix E.1.

    Raises:
        ConfigError: the inputs have another shape and are not images.

    Example:
        >>> resize(torch.zeros(5, 3, 16, 16), (1, 8, 8)).shape
        torch.Size([5, 1, 8, 8])
    """
    if tuple(x.shape[1:]) == tuple(shape):
        return x
    if len(shape) != 3 or x.dim() != 4:
        raise ConfigError(
            f"risk.data: its inputs have the shape {tuple(x.shape[1:])}, but the model takes "
            f"{tuple(shape)}"
        )
    x = nn.functional.interpolate(x, size=tuple(shape[1:]), mode="bilinear", antialias=True)
    if x.shape[1] == shape[0]:
        return x
    return x.mean(dim=1, keepdim=True).expand(-1, shape[0], -1, -1)


def measure(
    model: Model,
    task: Task,
    public: PublicExamples,
    settings: ShadowTraining,
    *,
    shape: tuple[int, ...] | None = None,
    clip: float = 1.0,
    seed: int | None = None,
    progress: OnProgress | None = None,
) -> Findings:
    """Measure the layer risk of a model's architecture. The function sees only its arguments, which
    contain no private example.

    Args:
        model: the recipe's section [model].
        task: the model's task.
        public: public examples.
        settings: settings of the shadow model and the adversaries.
        shape: shape of one input of the target; images of another shape are resized.
        clip: clipping bound C, for the weights for convergence.
        seed: seed of all draws; None draws it from the operating system.
        progress: see `layer_risk`.

    Raises:
        ConfigError: there are too few examples, or the model cannot process them.
    """
    x = public.x if shape is None else resize(public.x, shape)
    shape = tuple(x.shape[1:])
    with in_section("model", model.name):
        shadow = models.build(
            model.name, in_shape=shape, classes=public.classes, seed=seed or 0, **model.options
        )
    fresh, few = models.copy_model(shadow), slice(_BIASED)
    risks = layer_risk(
        shadow,
        x,
        public.y,
        keys=KeyRing.from_seed(seed),
        training=settings,
        task=task,
        progress=progress,
    )
    weights = public_bias_weights(
        fresh, LayerTable.from_module(fresh), x[few], public.y[few], clip, task
    )
    members = settings.count_members(len(x))
    return Findings(
        tuple(risks), public.source, len(x), min(members, len(x) - members), tuple(weights.tolist())
    )


def risk_of(
    recipe: Recipe, seed: int | None = None, progress: OnProgress | None = None
) -> Findings:
    """Measure the layer risk of a recipe's model by the recipe's section [risk] (see `measure`).
    docs/how-to/layer-risk.md shows an example.

    Raises:
        FedlgmError: the recipe or its public data cannot be used.
    """
    mechanism = recipe.mechanism
    if "error_rates" in mechanism.options or "emphasis" in mechanism.options:
        rates = mechanism.options.get("error_rates", ())
        check_risk(rates or None, mechanism.options.get("emphasis", 1.0), len(rates))
    section = recipe.risk or RiskSection()
    settings = ShadowTraining(
        **section.model_dump(include=set(ShadowTraining.__dataclass_fields__))
    )
    task = tasks.get(recipe.task.name, **recipe.task.options)
    chosen = recipe.run.seed if seed is None else seed
    shape, bound = input_shape(recipe), mechanism.options.get("bound")
    clip = float(bound) if isinstance(bound, int | float) and bound > 0 else 1.0
    return measure(
        recipe.model,
        task,
        public_examples(recipe),
        settings,
        shape=shape,
        clip=clip,
        seed=chosen,
        progress=progress,
    )


def measured_recipe(
    recipe: Recipe, findings: Findings, errors: Errors, emphasis: float
) -> Recipe | None:
    """Add the findings to the recipe; None if its mechanism does not use them."""
    if recipe.mechanism.name != "lm-dp-sgd":
        return None
    raw = recipe.model_dump(exclude_none=True)
    measured = {"error_rates": findings.rates(errors), "emphasis": emphasis}
    raw["mechanism"] |= {"group_by": "module", **measured}  # adversaries look at modules' outputs
    if recipe.mechanism.variant == "sound":
        raw["mechanism"]["strengths"] = [row.strength for row in findings.risks]
    return Recipe.model_validate(raw)


__all__ = ["Findings", "PublicExamples", "measure", "public_examples", "resize", "risk_of"]
