"""Tasks against scikit-learn's figures and plain torch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from sklearn import metrics as sk
from torch import Tensor, nn

from fedlgm.data import DataSet
from fedlgm.errors import ConfigError, DataError
from fedlgm.extension.testing import check_task
from fedlgm.training import models, tasks

DRAW = torch.Generator().manual_seed(3)
BATCHES: dict[str, tuple[Any, dict[str, Any], Tensor, Tensor]] = {
    "classes": ("classification", {}, torch.randn(7, 4, generator=DRAW), torch.arange(7) % 4),
    "pixels": (
        "classification",
        {},
        torch.randn(5, 3, 2, 2, generator=DRAW),
        torch.randint(3, (5, 2, 2), generator=DRAW),
    ),
    "numbers": (
        "regression",
        {},
        torch.randn(6, 1, generator=DRAW),
        torch.randn(6, generator=DRAW),
    ),
    "absolute": (
        "regression",
        {"loss": "absolute"},
        torch.randn(6, 3, generator=DRAW),
        torch.randn(6, 3, generator=DRAW),
    ),
    "huber": (
        "regression",
        {"loss": "huber"},
        3 * torch.randn(6, 2, generator=DRAW),
        torch.zeros(6, 2),
    ),
    "yes or no": ("binary", {}, torch.randn(6, generator=DRAW), torch.tensor([0.0, 1, 1, 0, 1, 0])),
    "labels": (
        "multi-label",
        {},
        torch.randn(5, 3, generator=DRAW),
        (torch.randn(5, 3, generator=DRAW) > 0).float(),
    ),
    "tokens": (
        "next-token",
        {},
        torch.randn(4, 5, 6, generator=DRAW),
        torch.randint(6, (4, 5), generator=DRAW),
    ),
    "padded": (
        "next-token",
        {},
        torch.randn(3, 4, 6, generator=DRAW),
        torch.tensor([[1, 2, -100, -100], [5, 0, 3, -100], [2, 2, 2, 2]]),
    ),
    "not shifted": (
        "causal-lm",
        {},
        torch.randn(3, 4, 6, generator=DRAW),
        torch.tensor([[1, 2, -100, -100], [5, 0, 3, 1], [2, 2, 2, 2]]),
    ),
}


class Fixed(nn.Module):
    """Gives rows of a table by their number."""

    def __init__(self, table: Tensor) -> None:
        super().__init__()
        self.table = nn.Parameter(table)

    def forward(self, rows: Tensor) -> Tensor:
        return self.table[rows]


def figures(name: str, batch_size: int = 1000) -> dict[str, float]:
    task, options, outputs, targets = BATCHES[name]
    module = Fixed(outputs)
    return tasks.evaluate(
        tasks.get(task, **options), module, torch.arange(len(targets)), targets, batch_size
    )


@pytest.mark.parametrize("name", BATCHES)
def test_bundled_tasks_pass_the_test_kit(name: str) -> None:
    task, options, outputs, targets = BATCHES[name]
    check_task(tasks.get(task, **options), outputs, targets)


@pytest.mark.parametrize("name", BATCHES)
def test_figures_do_not_depend_on_how_data_are_batched(name: str) -> None:
    assert figures(name) == pytest.approx(figures(name, batch_size=2), rel=1e-5)


def test_evaluation_in_another_layout_changes_neither_figures_nor_model() -> None:
    """Max-pooling is faster in channels-last layout, which evaluation uses and takes back."""
    module = models.build("cnn", in_shape=(1, 28, 28), classes=10, seed=1)
    x, y = (
        torch.rand(300, 1, 28, 28, generator=torch.Generator().manual_seed(1)),
        torch.arange(300) % 10,
    )
    with torch.no_grad():
        loss = float(nn.functional.cross_entropy(module(x), y))
    assert tasks.evaluate(tasks.get("classification"), module, x, y)["loss"] == pytest.approx(
        loss, rel=1e-5
    )
    assert not any(child._forward_hooks for child in module.modules())
    with torch.no_grad():
        assert module.conv1(x[:2]).is_contiguous()


def test_only_the_first_evaluation_looks_for_the_layout() -> None:
    module, calls = models.build("cnn", in_shape=(1, 28, 28), classes=10, seed=1), list[int]()
    module.register_forward_pre_hook(lambda _, inputs: calls.append(len(inputs[0])))
    for _ in range(3):
        tasks.evaluate(
            tasks.get("classification"), module, torch.rand(5, 1, 28, 28), torch.arange(5)
        )
    assert calls == [2, 5, 5, 5]


def test_classification_figures() -> None:
    _, _, outputs, targets = BATCHES["classes"]
    found = figures("classes")
    assert found["loss"] == pytest.approx(
        sk.log_loss(targets, outputs.double().softmax(1), labels=range(4)), rel=1e-5
    )
    assert found["accuracy"] == sk.accuracy_score(targets, outputs.argmax(1))
    _, _, pixels, labels = BATCHES["pixels"]
    assert figures("pixels")["accuracy"] == pytest.approx(
        float((pixels.argmax(1) == labels).float().mean())
    )


def test_regression_figures() -> None:
    _, _, outputs, targets = BATCHES["numbers"]
    squared = sk.mean_squared_error(targets, outputs[:, 0])
    expected = {
        "loss": squared,
        "rmse": math.sqrt(squared),
        "mae": sk.mean_absolute_error(targets, outputs[:, 0]),
    }
    assert figures("numbers") == pytest.approx(expected, rel=1e-5)
    _, _, outputs, targets = BATCHES["absolute"]
    found = figures("absolute")
    absolute = pytest.approx(sk.mean_absolute_error(targets, outputs), rel=1e-5)
    assert found["loss"] == absolute
    assert found["mae"] == absolute
    _, _, outputs, targets = BATCHES["huber"]
    assert figures("huber")["loss"] == pytest.approx(
        float(nn.HuberLoss()(outputs, targets)), rel=1e-5
    )


def test_binary_figures() -> None:
    _, _, outputs, targets = BATCHES["labels"]
    found = figures("labels")
    assert found["loss"] == pytest.approx(float(nn.BCEWithLogitsLoss()(outputs, targets)), rel=1e-5)
    assert found["accuracy"] == pytest.approx(
        float(((outputs > 0) == (targets > 0)).float().mean())
    )
    assert found["f1"] == pytest.approx(sk.f1_score(targets, outputs > 0, average="micro"))
    none = tasks.evaluate(
        tasks.Binary(), Fixed(torch.full((3,), -1.0)), torch.arange(3), torch.zeros(3)
    )
    assert none["f1"] == 0


def test_next_token_figures_count_tokens_and_training_counts_sequences() -> None:
    _, _, outputs, targets = BATCHES["padded"]
    kept = targets != tasks.PADDING
    found = figures("padded")
    loss = float(nn.functional.cross_entropy(outputs[kept], targets[kept]))
    assert found["loss"] == pytest.approx(loss, rel=1e-5)
    assert found["perplexity"] == pytest.approx(math.exp(loss), rel=1e-5)
    assert found["accuracy"] == pytest.approx(
        float((outputs.argmax(2) == targets)[kept].float().mean())
    )
    rows = [nn.functional.cross_entropy(outputs[i][kept[i]], targets[i][kept[i]]) for i in range(3)]
    torch.testing.assert_close(tasks.NextToken().losses(outputs, targets), torch.stack(rows))
    uniform = tasks.evaluate(
        tasks.NextToken(), Fixed(torch.zeros(3, 4, 6)), torch.arange(3), targets
    )
    assert uniform["perplexity"] == pytest.approx(6)
    hopeless = tasks.evaluate(
        tasks.NextToken(), Fixed(1e4 * torch.eye(6)[None, :4]), torch.arange(1), targets[2:]
    )
    assert hopeless["perplexity"] == math.inf


class Margin(tasks.Task):
    """A task as a user would write it."""

    name = "margin"

    def __init__(self, margin: float = 1.0) -> None:
        self.margin = margin

    def losses(self, outputs: Tensor, targets: Tensor) -> Tensor:
        return (self.margin - outputs[:, 0] * targets).clamp(min=0)


def test_tasks_are_found_by_name_object_class_function_and_dotted_name() -> None:
    assert tasks.get() == tasks.get("classification") == tasks.Classification()
    assert tasks.get("regression", loss="huber") != tasks.get("regression")
    assert tasks.get(Margin, margin=2.0).margin == 2.0  # type: ignore[attr-defined]
    own = Margin()
    assert tasks.get(own) is own
    assert isinstance(tasks.get("fedlgm.training.tasks:NextToken"), tasks.NextToken)
    assert tasks.options("regression") == ("loss",)
    assert tasks.options("next-token") == ()
    outputs, targets = torch.randn(4, 1), torch.tensor([1.0, -1, 1, -1])
    check_task(Margin(), outputs, targets)
    check_task(nn.L1Loss(reduction="none"), outputs[:, 0], targets)
    assert set(tasks.names()) == {
        "classification",
        "hazards",
        "regression",
        "binary",
        "ranked",
        "multi-label",
        "next-token",
        "causal-lm",
    }


@pytest.mark.parametrize(
    ("task", "options", "message"),
    [
        ("ranking", {}, r"unknown task 'ranking'; known: classification, regression"),
        ("regression", {"loss": "cubic"}, r"unknown loss 'cubic'; known: squared, absolute, huber"),
        (
            "regression",
            {"margin": 1},
            r"task 'regression': unknown option 'margin'; its options: loss",
        ),
        (
            "absent_module:Task",
            {},
            r"task 'absent_module:Task': module 'absent_module' cannot be imported",
        ),
        ("math:pi", {}, r"task 'math:pi' is neither a fedlgm.tasks.Task nor a function"),
        (Margin(), {"margin": 2.0}, r"is an object already: it takes no options, got margin"),
        (3, {}, r"is neither a fedlgm.tasks.Task nor a function"),
    ],
)
def test_what_is_no_task_is_refused(task: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tasks.get(task, **options)


class Weighted(Margin):
    """Takes the weights of its classes, and counts them."""

    def __init__(self, weights: Any) -> None:
        super().__init__(len(weights))


def test_an_option_that_is_missing_differs_from_an_error_inside() -> None:
    with pytest.raises(
        ConfigError, match=r"^task Weighted: missing .* 'weights'; its options: weights$"
    ):
        tasks.get(Weighted)
    with pytest.raises(
        ConfigError, match=r"^task Weighted: TypeError: .* \(test_tasks.py, line \d+\)$"
    ):
        tasks.get(Weighted, weights=3)


def no_memory(*_: Any) -> Tensor:
    raise MemoryError("no memory")


def test_a_task_or_model_without_enough_memory_is_not_called_unfit() -> None:
    data = data_of([0.0, 1.0])

    class Large(nn.Linear):
        forward = no_memory

    for task, model in ((tasks.get(no_memory), nn.Linear(3, 1)), (tasks.get(Margin), Large(3, 1))):
        with pytest.raises(MemoryError, match="no memory"):
            task.check(model, data)


def data_of(y: Any, classes: int | None = None) -> DataSet:
    y = np.asarray(y)
    return DataSet(
        "own", np.zeros((len(y), 3), np.float32), y, np.zeros((len(y), 3), np.float32), y, classes
    )


@pytest.mark.parametrize(
    ("task", "y", "message"),
    [
        (
            "classification",
            [0.5, 1.5],
            r"needs integer targets .* training targets are float64: .* task 'regression'",
        ),
        ("classification", [0, -1], r"targets of at least 0, but the training targets begin at -1"),
        (
            "regression",
            [0.5, math.nan],
            r"1 of the training targets are NaN or infinite, the first at index \(1,\)",
        ),
        ("regression", ["a", "b"], r"needs numbers as targets"),
        (
            "binary",
            [0, 2],
            r"needs targets 0 and 1, but the training targets hold 2: .* 'classification'",
        ),
        ("next-token", [[0.5, 1.0]], r"needs integer targets \(each the number of a token\)"),
        (Margin(), [1.0, math.inf], r"NaN or infinite"),
    ],
)
def test_targets_that_do_not_suit_are_refused(task: Any, y: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        tasks.get(task).prepare(data_of(y))


def test_targets_take_the_type_of_the_task() -> None:
    data = data_of(np.array([0, 1, 1], dtype=np.uint8))
    assert tasks.get("classification").prepare(data).train_y.dtype == np.int64
    assert tasks.get("binary").prepare(data).test_y.dtype == np.float32
    ready = data_of(np.array([0, 1, 1]))
    assert tasks.get("classification").prepare(ready) is ready
    assert tasks.get("regression").outputs(data_of(np.zeros((4, 2), np.float32))) == 2
    assert tasks.get("binary").outputs(data_of(np.zeros(4, np.float32))) == 1
    assert tasks.get("classification").outputs(data_of([0, 1], classes=5)) == 5


@pytest.mark.parametrize(
    ("task", "outputs", "y", "message"),
    [
        (
            "classification",
            2,
            [0, 1, 2],
            r"model has 2 outputs, but the targets of 'own' go up to class 2: it needs at least 3",
        ),
        (
            "regression",
            2,
            [0.5, 1.5, 1.0],
            r"outputs of shape \(2, 2\) and targets of shape \(2,\): .* shape \(2, 1\)",
        ),
        (
            "binary",
            1,
            [[0, 1], [1, 1]],
            r"'binary' does not fit the model's outputs of shape \(2, 1\)",
        ),
        ("next-token", 3, [[0, 1], [1, 1]], r"outputs must be logits \[n, length, vocabulary\]"),
        (
            nn.CrossEntropyLoss(),
            3,
            [0, 1],
            r"losses must have shape \(2,\), one per example, but they have \(\)",
        ),
        (
            lambda outputs, targets: (outputs - targets).sum(1),
            3,
            [[1.0, 2], [3, 4]],
            r"does not fit .*: RuntimeError",
        ),
    ],
)
def test_a_task_that_does_not_fit_the_model_is_refused(
    task: Any, outputs: int, y: Any, message: str
) -> None:
    found = tasks.get(task)
    with pytest.raises(ConfigError, match=message):
        found.check(nn.Linear(3, outputs), found.prepare(data_of(y)))


def test_a_model_that_does_not_take_the_data_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match=r"does not take a batch of the data 'own', \('float32', \(2, 3\)\): RuntimeError",
    ):
        tasks.Classification().check(nn.Linear(4, 2), data_of([0, 1]))
    tasks.Classification().check(nn.Linear(3, 2), data_of([0, 1]))


def test_integers_that_a_model_does_not_take_are_explained() -> None:
    data = DataSet.from_arrays(
        (np.ones((4, 3), np.uint8), [0, 1, 0, 1]), (np.ones((4, 3), np.uint8), [0, 1, 0, 1])
    )
    with pytest.raises(
        ConfigError, match=r"integers are tokens, .*; other inputs are floats, such as x / 255"
    ):
        tasks.Classification().check(nn.Linear(3, 2), data)


class Own(tasks.Task):
    """Absolute errors, with one flaw."""

    def __init__(self, flaw: str) -> None:
        self.flaw = flaw
        if flaw == "headline":
            self.headline = "auc"  # type: ignore[misc]
        if flaw == "better":
            self.better = "up"  # type: ignore[misc, assignment]

    def losses(self, outputs, targets):
        losses = ((outputs.detach() if self.flaw == "detached" else outputs)[:, 0] - targets).abs()
        return [losses] if self.flaw == "list" else losses

    def metrics(self, means):
        if self.flaw == "fails":
            return {"loss": 1 / 0}
        return (
            {"mae": 1.0}
            if self.flaw == "no loss"
            else means | ({"note": "good"} if self.flaw == "text" else {})
        )


@pytest.mark.parametrize(
    ("flaw", "message"),
    [
        ("headline", r"its metrics must hold 'auc', but they are 'loss'"),
        ("better", r"better must be 'higher' or 'lower', but it is 'up'"),
        ("detached", r"its loss has no gradient"),
        ("list", r"one per example, but they have list"),
        ("fails", r"its figures cannot be computed: ZeroDivisionError"),
        ("no loss", r"its metrics must hold 'loss', but they are 'mae'"),
        ("text", r"its figures cannot be computed: ValueError: .*'good'"),
    ],
)
def test_a_task_whose_figures_no_run_could_show_is_refused(flaw: str, message: str) -> None:
    data = data_of([0.5, 1.5])
    Own("").check(nn.Linear(3, 1), data)
    with pytest.raises(ConfigError, match=message):
        Own(flaw).check(nn.Linear(3, 1), data)


class TestIgnoredPixels:
    """Pixels with the target -100 count nowhere: not in losses, gradients or figures."""

    def test_a_segmentation_ignores_them(self):
        task, outputs = tasks.get("classification"), torch.randn(3, 4, 5, 5)
        y = torch.randint(0, 4, (3, 5, 5))
        assert torch.allclose(
            task.losses(outputs, y),
            torch.nn.functional.cross_entropy(outputs, y, reduction="none").flatten(1).mean(1),
        )
        y[0, :3], y[1] = -100, -100
        losses = task.losses(outputs, y)
        assert losses[1] == 0
        assert torch.allclose(
            losses[0], torch.nn.functional.cross_entropy(outputs[:1, :, 3:], y[:1, 3:])
        )
        assert torch.allclose(task.loss(outputs, y), losses.mean())
        assert task.count(y) == int((y >= 0).sum())

    def test_targets_that_are_all_ignored_or_withheld_are_refused(self):
        task = tasks.get("classification")
        assert task.targets(np.array([[0, -100]]), "test").tolist() == [[0, -100]]
        with pytest.raises(DataError, match=r"all test targets are -100, which is ignored"):
            task.targets(np.full((2, 2), -100), "test")
        with pytest.raises(
            DataError,
            match=r"the test targets begin at -1: none is a class, as in sets whose labels are",
        ):
            task.targets(np.full(3, -1), "test")
        with pytest.raises(DataError, match=r"targets begin at -100: np\.unique"):
            task.targets(np.array([0, -100]), "test")
