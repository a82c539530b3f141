"""Plain values of advice, as printed and stored."""

from __future__ import annotations

from typing import TypedDict


class StageRow(TypedDict):
    """One model of the warm-up.

    Attributes:
        steps: steps made so far.
        metrics: metrics on held-out public examples.
        initial_loss: loss of the initial model on the same examples.
        ratios: score of each rule over the score of the flat Gaussian.
    """

    steps: int
    metrics: dict[str, float]
    initial_loss: float
    ratios: dict[str, float]


class LayerAdvice(TypedDict):
    """Advice on one layer.

    Attributes:
        layer: name of the layer.
        size: number d_l of coordinates.
        norm: median l2 norm of a unit's unbounded contribution, over units and stages.
        trace: curvature trace(H_l), as the mean over the stages.
        suggested_bound: a norm that can be given as a public norm if clip = "med" and norms =
            "public". The total l2 norm of these bounds is the median norm of a whole contribution.
    """

    layer: str
    size: int
    norm: float
    trace: float
    suggested_bound: float


class Advice(TypedDict):
    """Result of `recommend`.

    Attributes:
        recipe: name of the recipe.
        unit: "client" or "example".
        public: origin of the public examples, in words.
        advice: recommendation in a sentence.
        scores: score of each rule over the score of the flat Gaussian, as the geometric mean over
            the stages.
        stages: the models of the warm-up.
        layers: the model's layers.
        noise_multiplier: noise multiplier z: the noise of a release divided by the bound.
        noise_on_mean: z sqrt(k) / (q N), the standard deviation of the mean update's noise divided
            by the bound, if a sum of q N contributions contains the noise of k releases.
        bound: the bound S that was scored.
        suggested_bound: median norm of a whole unbounded contribution.
        examples_per_client: mean number of the run's examples per client.
        assumed: whether the number of examples per client was unknown and set to one batch.
        private_examples_read: number of private examples read, always 0.
    """

    recipe: str
    unit: str
    public: str
    advice: str
    scores: dict[str, float]
    stages: list[StageRow]
    layers: list[LayerAdvice]
    noise_multiplier: float
    noise_on_mean: float
    bound: float
    suggested_bound: float
    examples_per_client: float
    assumed: bool
    private_examples_read: int
