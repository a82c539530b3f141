"""Functions with which users test their own models, data, mechanisms and tasks.

    from fedlgm.testing import check_data, check_mechanism, check_model, check_task

    def test_my_model():
        check_model(Net, my_data, task="regression")

    def test_my_mechanism():
        check_mechanism(InverseSize("inverse-size"))

If there is a problem, these functions raise a `FedlgmError` that names it in one sentence. The
bundled models, data and tasks pass the same checks.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedlgm.aggregation import BoundedSum, bound_update
from fedlgm.data import DataSet, Loadable, Partition, load
from fedlgm.errors import ConfigError, DataError, Notice, PrivacyError
from fedlgm.extension.restored import fresh
from fedlgm.extension.separation import shared_state
from fedlgm.extension.trial import prepare_data, require_same_losses
from fedlgm.mechanisms import BoundsExamples, Mechanism
from fedlgm.mechanisms.mechanism import require_mechanism
from fedlgm.mechanisms.method import Method
from fedlgm.planning import charging
from fedlgm.planning.clipping import Scaling
from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.planning.transcript import Transcript
from fedlgm.privacy.accounting import composed_epsilon
from fedlgm.training import (
    ClientTask,
    LocalTraining,
    SequentialTrainer,
    VectorizedTrainer,
    inputs,
    models,
    tasks,
)
from fedlgm.training.example_level.bounding import bound_gradients
from fedlgm.training.example_level.scaling import one_by_one
from fedlgm.training.tasks import Task
from fedlgm.training.tasks.task import SUMMED, figures_of, require_separate_losses, require_sums
from fedlgm.wording import prefix_key

_EXAMPLES = 6  # examples of the larger of the two test clients
_BATCH = 4
_SCALES = (0.0, 1e-6, -0.05, 1.0, -1e4)  # scales of artificial releases, including zero
_ROUNDING = 1e-2  # largest relative difference between updates that rounding explains


def check_data(data: Loadable, task: Any = None, *, allow_empty: bool = False) -> DataSet:
    """Check a data set: lengths, shapes, types, finite values, targets for the task, and clients.

    Args:
        data: any argument of `fedlgm.data.load`. Each load must give the same arrays, so that runs
            can be resumed.
        task: any argument of `fedlgm.training.tasks.get`.
        allow_empty: whether to accept clients without examples. A run does not train such clients,
            but counts them as clients.

    Returns:
        The data set, with targets of the task's type.

    Raises:
        FedlgmError: a check fails.

    >>> x, y = np.zeros((6, 3)), np.arange(6) % 2
    >>> check_data({"train": (x, y), "test": (x, y), "clients": [[0, 1, 2], [3, 4, 5]]}).classes
    2
    """
    data_set = load(data)
    if not _same(data_set, load(data)):
        raise DataError(
            f"data {data_set.name!r}: loading it twice gives different arrays; fix its random seed"
        )
    data_set, _ = prepare_data(tasks.get(task), data_set.validate())
    if data_set.clients is not None and not allow_empty:
        _check_clients(data_set.name, data_set.clients)
    return data_set


def check_mechanism(
    mechanism: Mechanism, layers: LayerTable | None = None, facts: RunFacts | None = None
) -> None:
    """Check that a mechanism's plans are pure and can be serialised, that bounds hold, that a
    plan's event covers the effect of a client or example, and that all rounds stay within the
    budget.

    Plans are made for all rounds, with artificial past releases, on which the cost of a round must
    not depend. The check measures how far some contributions of a client or example move the sum,
    and does not rely on the bounds that the mechanism claims.

    Args:
        mechanism: the mechanism.
        layers: layer table of a model; by default, four layers with 1 to 300 coordinates.
        facts: the run's facts, with a budget; by default, central trust and epsilon 8 at delta 1e-5
            over 6 rounds in which every client takes part (the cost of such rounds has a closed
            form).

    Raises:
        FedlgmError: a check fails.

    >>> from fedlgm import mechanisms
    >>> check_mechanism(mechanisms.get("uniform"))
    """
    require_mechanism(mechanism)
    unused = copy.deepcopy(mechanism)
    layers = mechanism.table(layers or LayerTable.from_sizes({"a": 12, "b": 1, "c": 300, "d": 40}))
    facts = facts or RunFacts(0.0, Sampling("poisson", 100, 1.0), rounds=6, epsilon=8.0, delta=1e-5)
    method = Method.calibrate(mechanism, layers, facts)
    facts = method.facts
    costs = mechanism.costs(layers, facts.rounds)
    if np.shape(costs) != (facts.rounds,):
        raise ConfigError(
            f"{mechanism.name}: costs must have one figure per round, got shape {np.shape(costs)}"
        )
    events = []
    for scale in _SCALES:  # `Method.plan` refuses a round if its cost depends on past releases
        for other in _transcripts(method, scale):
            method.plan(other)
    for transcript in _transcripts(method):
        plan = _pure_plan(method, transcript, copy.deepcopy(unused))
        if not plan.protected:
            continue  # an unprotected plan makes no promise
        if isinstance(mechanism, BoundsExamples):
            _check_scaling(mechanism.name, plan, mechanism.scaling(plan))
        _check_bounds(mechanism, plan)
        events.append((plan.event, 1))
    charged = events[: facts.releases] if not charging.of(facts).joint else events
    spent = composed_epsilon(charged, facts.budget()[1]) if charged else 0.0
    if spent > facts.budget()[0] * (1 + 1e-6) and (costs <= 1).all():
        raise PrivacyError(
            f"{mechanism.name}: {facts.releases} rounds cost epsilon {spent:.4g}, but the budget "
            f"is {facts.epsilon:g}"
        )


def _transcripts(method: Method, scale: float = 0.05) -> Iterator[Transcript]:
    """Yield the transcript before each round, with artificial releases of the size `scale`."""
    generator = torch.Generator().manual_seed(1)
    transcript = Transcript.start(torch.randn(method.layers.size, generator=generator))
    for _ in range(method.facts.rounds):
        yield transcript
        plan = method.plan(transcript)
        mean = torch.randn(plan.size, generator=generator) * scale
        model = transcript.models[-1] + 2 * scale * torch.randn(
            method.layers.size, generator=generator
        )
        transcript = transcript.extend(model, mean, plan)


def _pure_plan(method: Method, transcript: Transcript, fresh: Mechanism) -> ReleasePlan:
    """Make a plan. Refuse the mechanism if planning changes the past releases, or if a second plan,
    the plan of a fresh copy of the mechanism, or the plan that a client decodes from JSON is
    different.
    """
    mechanism, layers, facts = method.mechanism, method.layers, method.facts
    past = tuple(tensor.clone() for tensor in _tensors(transcript))
    planned = method.plan(transcript)
    plan, again, resumed = (
        m.plan(layers, facts, transcript) for m in (mechanism, mechanism, fresh)
    )
    if plan.to_json() != again.to_json():
        raise PrivacyError(
            f"{mechanism.name}: plan() returns a different plan for the same arguments: it must be "
            "pure"
        )
    if plan.to_json() != resumed.to_json():
        raise PrivacyError(
            f"{mechanism.name}: after earlier rounds plan() returns a different plan from a new "
            "object, such as a resumed run makes: it must depend only on its arguments, and keep "
            "no state"
        )
    if any(
        not torch.equal(before, now) for before, now in zip(past, _tensors(transcript), strict=True)
    ):
        raise PrivacyError(
            f"{mechanism.name}: plan() changes the past releases that it is given: leave them as "
            "they are"
        )
    if plan.facts != facts:
        raise PrivacyError(
            f"{mechanism.name}: the plan's facts are not the run's: pass `facts` on unchanged"
        )
    received = ReleasePlan.from_json(layers, planned.to_json())
    if received.to_json() != planned.to_json() or received.event != planned.event:
        raise ConfigError(f"{mechanism.name}: the plan changes when it is sent to the clients")
    return planned


def _tensors(transcript: Transcript) -> tuple[Tensor, ...]:
    return (*transcript.models, *(() if transcript.mean is None else (transcript.mean,)))


def _check_bounds(mechanism: Mechanism, plan: ReleasePlan) -> None:
    """Check for some contributions that, once bounded, they do not move the sum further than the
    plan's event covers. Distances are in units of the noise's scale.
    """
    size, scales = plan.layers.size, plan.scales
    generator = torch.Generator().manual_seed(2)
    tried = [scale * torch.randn(size, generator=generator) for scale in (1e-3, 1.0, 1e6)]
    for low, high in zip(plan.layers.offsets[:-1], plan.layers.offsets[1:], strict=True):
        tried.append(torch.zeros(size).index_fill_(0, torch.arange(low, high), 1e6))
    examples = isinstance(mechanism, BoundsExamples)
    if (plan.bounded_by == "trainer") != examples:
        who = "its trainer to" if plan.bounded_by == "trainer" else "the sum to"
        raise PrivacyError(
            f"{mechanism.name}: its plan relies on {who} bound, but its class does not "
            "(BoundsExamples)"
        )
    if plan.size == 0:
        return
    order = 2 if plan.family == "gaussian" else 1
    for update in tried:
        if isinstance(mechanism, BoundsExamples):
            total = BoundedSum.empty(plan)
            total.add(bound_gradients(update[None], mechanism.scaling(plan), plan))
            bounded = total.total
        else:
            bounded = bound_update(update, plan)
        moved = float(np.linalg.norm(bounded.numpy() / scales, order))
        _require_covered(
            f"{mechanism.name}: {'an example' if examples else 'a client'}", moved, plan
        )


def _check_scaling(name: str, plan: ReleasePlan, scaling: Scaling) -> None:
    """Check, for many combinations of the norms of an example's layers, that the scaled gradient
    does not exceed the plan's bounds and does not move the sum further than the plan's event
    covers.
    """
    count, generator = len(plan.layers), torch.Generator().manual_seed(3)
    rows = [
        torch.rand(64, count, dtype=torch.float64, generator=generator) * scale
        for scale in (1e-6, 1.0, 1e9)
    ]
    norms = torch.cat([*rows, torch.zeros(1, count).double(), 1e9 * torch.eye(count).double()])
    factors = one_by_one(scaling).factors(norms)
    lengths = (factors * norms).numpy()
    if (lengths > np.where(plan.released, plan.clip, np.inf) * (1 + 1e-9)).any():
        raise PrivacyError(
            f"{name}: its scaling leaves an example's gradient longer than the plan's bounds"
        )
    moved = float(
        np.linalg.norm(lengths[:, plan.indices] / plan.sigma[plan.indices], axis=1).max(initial=0.0)
    )
    _require_covered(f"{name}: an example", moved, plan)


def _require_covered(unit: str, moved: float, plan: ReleasePlan) -> None:
    """Refuse a plan whose event does not cover that a client or example (`unit`) moves the sum by
    `moved`, in units of the noise's scale.
    """
    times = moved * plan.effective_multiplier
    if times > 1 + 1e-6:
        raise PrivacyError(f"{unit} moves the sum by {times:.4g} times what is accounted for")


def check_task(task: Any, outputs: Tensor, targets: Tensor) -> Task:
    """Check on a batch that a task gives one loss per example, which does not depend on other
    examples, and that its mean loss, its gradients and its metrics are correct.

    Args:
        task: any argument of `fedlgm.training.tasks.get`.
        outputs: outputs of a model [n, ...], n >= 2.
        targets: targets [n, ...] of the task's type.

    Returns:
        The task as an object.

    Raises:
        FedlgmError: a check fails.

    >>> check_task(torch.nn.L1Loss(reduction="none"), torch.randn(8), torch.randn(8)).headline
    'loss'
    """
    instance = tasks.get(task)
    label, count = f"task {instance.name!r}", len(targets)
    before = outputs.clone(), targets.clone()
    losses = instance.losses(outputs, targets)
    if not (torch.equal(before[0], outputs) and torch.equal(before[1], targets)):
        raise ConfigError(
            f"{label}: losses change the outputs or targets that they are given: leave them as "
            "they are"
        )
    if losses.shape != (count,):
        raise ConfigError(
            f"{label}: losses must have shape ({count},), one per example, but they have "
            f"{tuple(losses.shape)}" + ("" if losses.ndim else SUMMED)
        )
    require_separate_losses(instance, outputs, targets)
    stacked = torch.func.vmap(torch.func.grad(instance.loss))(outputs[None], targets[None])[0]
    gradient = torch.zeros_like(outputs)
    for operation in instance.gradient_operations(outputs, targets, gradient):
        operation()
    if not inputs.close(gradient, stacked):
        raise ConfigError(
            f"{label}: gradient_operations do not write the gradient of the mean loss"
        )
    figures = figures_of(instance, [(outputs, targets)])
    for name in ("loss", instance.headline):
        if name not in instance.set_metrics() and not np.isfinite(figures.get(name, np.nan)):
            raise ConfigError(f"{label}: its metrics need a finite {name!r}, got {figures}")
    require_sums(instance, outputs, targets)
    return instance


def check_model(
    model: models.Model,
    data: Loadable,
    task: Any = None,
    *,
    vectorized: bool = True,
    **options: Any,
) -> None:
    """Check that a model has trainable parameters, that training changes no buffers, that the
    outputs fit the task, and that every trainer can train the model.

    Local training must be deterministic and independent of earlier clients, and must give the same
    result (up to rounding) for one client at a time and for many clients at once.

    Args:
        model: any argument of `fedlgm.training.models.build`.
        data: any argument of `fedlgm.data.load`; a few of its test examples are used.
        task: any argument of `fedlgm.training.tasks.get`.
        vectorized: whether the trainer of many clients at once (`training.vectorize`) must also
            support the model.
        **options: options of the model.

    Raises:
        FedlgmError: a check fails.

    >>> x, y = np.random.default_rng(1).normal(size=(40, 6)), np.arange(40) % 2
    >>> check_model(nn.Linear(6, 2), {"train": (x, y), "test": (x, y)})
    """
    instance = tasks.get(task)
    data_set, on_parts = prepare_data(instance, load(data))
    unused = fresh(instance)

    def build() -> nn.Module:
        return models.build(
            model, in_shape=data_set.shape, classes=instance.outputs(data_set), **options
        )

    module = build()
    models.require_trainable(module)
    fresh(instance).check(module, data_set)
    layers = LayerTable.from_module(module)
    start = layers.flatten(module)
    if not torch.equal(start, layers.flatten(build())):
        raise ConfigError(
            "model: building it twice gives different weights; draw them with torch only"
        )
    clients = _clients(data_set)
    require_same_losses(fresh(unused), on_parts, build(), clients[0].x, clients[0].y)
    with prefix_key("model"):
        models.require_repeatable(module, clients[0].x)
        drawn = models.draws_at_random(module, clients[0].x)
        if not drawn:
            models.require_separate(module, clients[0].x)

    why = shared_state(build(), fresh(instance))
    if why is not None:
        warnings.warn(Notice(f"a run's guarantee would be conditional: {why}"), stacklevel=3)
    settings = LocalTraining(lr=0.01, batch_size=_BATCH)
    sequential = SequentialTrainer(build(), layers, settings, task=instance)
    first, second, again = (
        update.clone() for update in sequential.updates(start, _fresh(clients, 0, 1, 0))
    )
    if not torch.isfinite(first).all() or not first.any():
        problem = "does not change" if torch.isfinite(first).all() else "turns NaN or infinite"
        raise ConfigError(f"model: it {problem} in training on the data's first test examples")
    reverse = SequentialTrainer(build(), layers, settings, task=unused).updates(
        start, _fresh(clients, 1, 0)
    )
    _, after = (update.clone() for update in reverse)
    if not (torch.equal(first, again) and torch.equal(first, after)):
        raise ConfigError(
            "model: its update depends on the client that was trained before: it or the task "
            "keeps state, or draws random numbers"
        )
    # PyTorch cannot draw random numbers for many clients at once, so clients are trained one by one
    if vectorized and not drawn:
        many = VectorizedTrainer(build(), layers, settings, width=2, task=instance)
        both = torch.cat([update.clone() for update in many.updates(start, _fresh(clients, 0, 1))])
        alone = torch.cat([first, second])
        different = (both - alone).norm(dim=1) / alone.norm(dim=1)
        if not bool((different <= _ROUNDING).all()) and not bool(
            (different <= _jumps(sequential, start, clients, alone)).all()
        ):
            raise ConfigError(
                "model: training many clients at once gives different updates from training one "
                "after another"
            )


def _jumps(
    trainer: SequentialTrainer, start: Tensor, clients: Sequence[ClientTask], updates: Tensor
) -> Tensor:
    """Estimate, for each of the two clients [2], the relative difference between the updates of two
    trainers that rounding can explain.

    If rounding moves an activation across zero, the gradient jumps. An update of ResNet-152 changes
    by up to 37 % if each weight changes by a millionth of its value. Three such changes of the
    weights are therefore tried. The result is three times the largest relative change of the
    update, but at most one half.
    """
    generator, largest = torch.Generator().manual_seed(4), torch.full((2,), _ROUNDING / 3)
    for _ in range(3):
        near = start * (1 + 1e-6 * torch.randn(start.shape, generator=generator))
        moved = torch.cat([one.clone() for one in trainer.updates(near, _fresh(clients, 0, 1))])
        largest = torch.maximum(largest, (moved - updates).norm(dim=1) / updates.norm(dim=1))
    return (3 * largest).clamp(max=0.5)


def _check_clients(name: str, clients: Partition) -> None:
    empty = np.flatnonzero(clients.sizes == 0)
    if len(empty):
        shown = ", ".join(map(str, empty[:5])) + (", ..." if len(empty) > 5 else "")
        raise DataError(
            f"data {name!r}: {len(empty)} of {len(clients)} clients have no examples: {shown}"
        )


def _clients(data: DataSet) -> list[ClientTask]:
    """Make two clients with different numbers of examples, which are taken from the test set."""
    clients, start = [], 0
    for count in (_EXAMPLES, _EXAMPLES - 3):
        rows = np.arange(start, start + count) % len(data.test_y)
        x = inputs.tensors(inputs.take(data.test_x, rows))
        clients.append(ClientTask(x, torch.from_numpy(data.test_y[rows]), torch.Generator(), 2))
        start += count
    return clients


def _fresh(clients: Sequence[ClientTask], *numbers: int) -> list[ClientTask]:
    """Select the clients with the given numbers, with new random generators. A client's examples
    have the same order after every call.
    """
    chosen = [(number, clients[number]) for number in numbers]
    return [
        ClientTask(c.x, c.y, torch.Generator().manual_seed(number), c.epochs)
        for number, c in chosen
    ]


def _same(left: DataSet, right: DataSet) -> bool:
    """Whether two data sets hold equal arrays."""
    arrays, others = left.parts(), right.parts()
    return arrays.keys() == others.keys() and all(
        np.array_equal(array, others[name], equal_nan=array.dtype.kind == "f")
        for name, array in arrays.items()
    )
