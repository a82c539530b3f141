"""Examples are apart by construction, whatever a user's model, hooks, task or scaling look at."""

import itertools
import warnings

import pytest
import torch
from torch import nn
from torch.nn.modules import module as modules

from fedlgm import RunFacts, Sampling, Transcript, mechanisms
from fedlgm.errors import ConfigError, Notice, PrivacyError
from fedlgm.mechanisms.method import Method
from fedlgm.noise.keys import KeyRing
from fedlgm.planning.layers import LayerTable
from fedlgm.privacy.ledger import Ledger
from fedlgm.training import tasks
from fedlgm.training.example_level.central import train
from fedlgm.training.example_level.engine import ExampleGradients
from fedlgm.training.example_level.scaling import FlatClip
from fedlgm.training.example_level.separation import (
    TRIED_ROWS,
    KnownLayers,
    MappedRows,
    TriedRows,
    has_known_layers,
)
from fedlgm.training.example_level.trainer import ExampleTrainer
from fedlgm.training.example_level.trial import try_examples

BOUND = 0.3
FEATURES = 6


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, 8), nn.Linear(8, 3)

    def before(self, x):
        return x

    def after(self, outputs):
        return outputs

    def forward(self, x):
        return self.after(self.last(torch.tanh(self.first(self.before(x)))))


class Winsorised(Net):
    def before(self, x):
        return torch.clamp(
            x, x.mean() - 6 * x.std(correction=0), x.mean() + 6 * x.std(correction=0)
        )


class ScaledLogits(Net):
    def after(self, outputs):
        return outputs * (30 / outputs.abs().max()).clamp(max=1)


class Quantised(Net):
    def before(self, x):
        step = x.abs().max().clamp(min=8) / 127
        return torch.round(x / step) * step


class Divided(Net):
    def before(self, x):
        return x / x.abs().max().clamp(min=10)


class ZeroedIfNotFinite(Net):
    def after(self, outputs):
        return torch.where(outputs.isfinite().all(), outputs, torch.zeros_like(outputs))


class FirstBatch(Net):
    mean = None

    def before(self, x):
        if self.mean is None:
            self.mean = x.mean()
        return x - self.mean


class Counting(Net):
    """Begins to remember late, in a list."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def before(self, x):
        self.seen.append(x.mean())
        return x - self.seen[-2] if len(self.seen) > 3 else x


class Losses:
    def losses(self, outputs, y):
        return self.of(nn.functional.cross_entropy(outputs, y, reduction="none"))


class SkipsOutlyingBatches(Losses):
    def of(self, losses):
        return losses if losses.max() < 50 else torch.zeros_like(losses)


class DropsOutliers(Losses):
    def of(self, losses):
        return torch.where(losses > losses.mean() + 4 * losses.std(correction=0), 0.0, losses)


class DividesByMean(Losses):
    def of(self, losses):
        return losses / losses.mean().clamp(min=20)


class ZeroesIfSumNotFinite(Losses):
    def of(self, losses):
        return losses if bool(losses.sum().isfinite()) else losses * 0


class Trimmed(Losses):
    def of(self, losses):
        if len(losses) <= 32:
            return losses
        return losses * (losses <= losses.quantile(0.9))


class Remembers(Losses):
    largest = 0.0

    def of(self, losses):
        self.largest = max(self.largest, losses.detach().max())
        return losses / (1 + self.largest)


MODELS = [Winsorised, ScaledLogits, Quantised, Divided, ZeroedIfNotFinite, FirstBatch, Counting]
LOSSES = [
    SkipsOutlyingBatches,
    DropsOutliers,
    DividesByMean,
    ZeroesIfSumNotFinite,
    Trimmed,
    Remembers,
]
PARTS = [(model, tasks.get) for model in MODELS] + [(Net, task) for task in LOSSES]


def engine(model, task=None):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", Notice)
        return ExampleGradients(model, LayerTable.from_module(model), task)


def of_autograd(model, x, y, bound=BOUND, task=None):
    """Sum of clipped gradients, one example at a time."""
    task, parameters = task or tasks.get(), list(model.parameters())
    total = torch.zeros(sum(value.numel() for value in parameters))
    for i in range(len(y)):
        loss = task.losses(model(x[i : i + 1]), y[i : i + 1]).sum()
        gradients = torch.autograd.grad(loss, parameters, allow_unused=True)
        pairs = zip(gradients, parameters, strict=True)
        gradient = torch.cat(
            [(torch.zeros_like(p) if g is None else g).flatten() for g, p in pairs]
        )
        total += gradient * min(1.0, bound / float(gradient.norm()))
    return total


@pytest.mark.parametrize(
    ("hostile", "place"), [(1e4, 0), (40.0, 20), (torch.inf, 40), (torch.nan, 0)]
)
@pytest.mark.parametrize(
    ("model", "task"), PARTS, ids=[(m if m is not Net else t).__name__ for m, t in PARTS]
)
def test_one_row_moves_a_sum_by_at_most_its_bound(model, task, place, hostile):
    torch.manual_seed(0)
    x, y = torch.randn(40, FEATURES), torch.randint(3, (40,))
    row = hostile * torch.randn(1, FEATURES)
    one_more = torch.cat([x[:place], row, x[place:]]), torch.cat([y[:place], y[:1], y[place:]])
    gradients = engine(model(), task())
    gradients.sum(x[:5], y[:5], FlatClip(BOUND))
    with_row = gradients.sum(*one_more, FlatClip(BOUND)).total
    without = gradients.sum(x, y, FlatClip(BOUND)).total
    assert not gradients.condition(x)
    assert float((with_row - without).norm()) <= BOUND * (1 + 1e-4)


def test_the_bound_of_rows_that_influence_each_other_would_break():
    """The test above would find what it looks for: the same models in one call for the batch."""
    torch.manual_seed(0)
    x, y = torch.randn(40, FEATURES), torch.randint(3, (40,))
    broken = 0
    for model in (Quantised, Divided, ZeroedIfNotFinite, FirstBatch):
        gradients = engine(model())
        gradients._separation = KnownLayers(gradients._module, gradients._replace_forward)
        gradients._probed = True
        for hostile in (1e4, torch.nan):
            one_more = torch.cat([x, hostile * torch.ones(1, FEATURES)]), torch.cat([y, y[:1]])
            moved = (
                gradients.sum(*one_more, FlatClip(BOUND)).total
                - gradients.sum(x, y, FlatClip(BOUND)).total
            )
            broken += float(moved.norm()) > 2 * BOUND
    assert broken >= 3


def recurrent(kind, **options):
    class Recurrent(nn.Module):
        def __init__(self):
            super().__init__()
            self.cell, self.last = kind(2, 5, **options), nn.Linear(5, 3)

        def forward(self, x):
            parts = x.reshape(len(x), -1, 2)
            outputs = self.cell(parts if options else parts.transpose(0, 1))[0]
            return self.last(outputs[:, -1] if options else outputs[-1])

    return Recurrent()


class OwnParameter(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale, self.last = nn.Parameter(torch.randn(FEATURES)), nn.Linear(FEATURES, 3)

    def forward(self, x):
        return self.last(x * self.scale)


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention, self.last = nn.MultiheadAttention(4, 2, batch_first=True), nn.Linear(4, 3)

    def forward(self, x):
        parts = x.reshape(len(x), -1, 1).expand(-1, -1, 4)
        return self.last(self.attention(parts, parts, parts)[0].mean(dim=1))


class Pooled(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm, self.pool = (
            nn.Conv2d(1, 4, 2, padding=1),
            nn.GroupNorm(2, 4),
            nn.MaxPool2d(2),
        )
        self.last = nn.Linear(4 * 2, 3)

    def forward(self, x):
        return self.last(
            self.pool(torch.relu(self.norm(self.convolution(x.view(-1, 1, 2, 3))))).flatten(1)[
                :, :8
            ]
        )


OWN = {
    "plain": Net,
    "LSTM": lambda: recurrent(nn.LSTM, batch_first=True),
    "GRU": lambda: recurrent(nn.GRU, batch_first=True),
    "sequence first": lambda: recurrent(nn.LSTM),
    "own parameter": OwnParameter,
    "attention": Attention,
    "pooled": Pooled,
    "torch": lambda: nn.Sequential(
        nn.TransformerEncoderLayer(FEATURES, 2, 8, dropout=0.0), nn.Linear(FEATURES, 3)
    ),
}


@pytest.mark.parametrize("make", OWN.values(), ids=OWN)
def test_sums_are_those_of_autograd_one_row_at_a_time(make):
    torch.manual_seed(0)
    model, x, y = make(), torch.randn(7, FEATURES), torch.randint(3, (7,))
    if isinstance(model, nn.Sequential):
        model[0].self_attn.batch_first = True
        x = x[:, None]
        model.append(nn.Flatten())
    gradients = engine(model)
    total = gradients.sum(x, y, FlatClip(BOUND)).total
    assert isinstance(gradients._separation, MappedRows)
    torch.testing.assert_close(total, of_autograd(model, x, y), rtol=1e-4, atol=1e-5)
    few = ExampleGradients(model, LayerTable.from_module(model), micro_batch=2)
    torch.testing.assert_close(few.sum(x, y, FlatClip(BOUND)).total, total, rtol=1e-4, atol=1e-5)


def doubled(module, arguments, output):
    return (2 * output[0], output[1]) if isinstance(output, tuple) else 2 * output


def halved(module, arguments, named):
    return tuple(value / 2 for value in arguments), named


def less_the_largest(module, arguments, output):
    return output - output.max() / 2


@pytest.mark.parametrize(
    "part", [lambda m: m, lambda m: m[0], lambda m: m[1], lambda m: m[2]], ids=["root", *"012"]
)
@pytest.mark.parametrize(
    "hooks", [doubled, less_the_largest, None], ids=["after", "of the batch", "before"]
)
def test_hooks_run_once_and_for_one_row(part, hooks):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.LayerNorm(FEATURES), nn.Linear(FEATURES, 5), nn.Tanh(), nn.Linear(5, 3)
    )
    x, y = torch.randn(7, FEATURES), torch.randint(3, (7,))
    if hooks is None:
        part(model).register_forward_pre_hook(halved, with_kwargs=True)
    else:
        part(model).register_forward_hook(hooks)
    total = engine(model).sum(x, y, FlatClip(BOUND)).total
    torch.testing.assert_close(total, of_autograd(model, x, y), rtol=1e-4, atol=1e-5)


def test_hooks_of_recurrent_layers_and_of_all_modules_run_once():
    torch.manual_seed(0)
    x, y = torch.randn(7, FEATURES), torch.randint(3, (7,))
    model = recurrent(nn.LSTM, batch_first=True)
    model.cell.register_forward_hook(doubled)
    total = engine(model).sum(x, y, FlatClip(BOUND)).total
    torch.testing.assert_close(total, of_autograd(model, x, y), rtol=1e-4, atol=1e-5)
    handle = modules.register_module_forward_hook(doubled)
    try:
        for model in (Net(), OwnParameter(), nn.Linear(FEATURES, 3)):
            total = engine(model).sum(x, y, FlatClip(BOUND)).total
            torch.testing.assert_close(total, of_autograd(model, x, y), rtol=1e-4, atol=1e-5)
    finally:
        handle.remove()


def test_a_replaced_forward_is_the_one_that_is_called_and_stays():
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(7, FEATURES), torch.randint(3, (7,))
    original = model.first.forward
    model.first.forward = replaced = lambda x: 2 * original(x)
    total = engine(model).sum(x, y, FlatClip(BOUND)).total
    assert model.first.forward is replaced
    torch.testing.assert_close(total, of_autograd(model, x, y), rtol=1e-4, atol=1e-5)


def test_nothing_of_a_batch_stays_in_a_models_attributes():
    torch.manual_seed(0)
    x, y = torch.randn(7, FEATURES), torch.randint(3, (7,))
    for model in (FirstBatch(), Counting()):
        gradients = engine(model)
        totals = [
            gradients.sum(rows, y, FlatClip(BOUND)).total for rows in (x, 100 * x, x, x, x, x)
        ]
        assert all(torch.equal(totals[0], totals[i]) for i in (2, 3, 4, 5))
        assert getattr(model, "mean", None) is None
        assert getattr(model, "seen", []) == []


class Branching(Net):
    """Depends on values in a way that vmap does not permit."""

    def before(self, x):
        if bool(x.isnan().any()):
            raise ValueError("a row has gaps")
        return x


def trained(model, assumes=""):
    mechanism = mechanisms.get("dp-sgd", bound=0.1)
    trainer = ExampleTrainer(model, mechanism.table(LayerTable.from_module(model)), mechanism)
    facts = RunFacts(1.0, Sampling("poisson", 12, 0.5)).assuming(assumes)
    return trainer, mechanism.plan(trainer.layers, facts, Transcript.start(trainer.weights))


def test_a_guarantee_that_rests_on_a_trial_is_conditional_and_a_proven_one_is_refused():
    x, y = torch.randn(12, FEATURES), torch.randint(3, (12,))
    trainer, plan = trained(Branching())
    assert plan.guarantee.status == "proven"
    with pytest.raises(PrivacyError, match=r"omits a condition of the model.*torch\.func\.vmap"):
        trainer.sum(x, y, torch.arange(3), plan)
    assert trainer.condition(x) == TRIED_ROWS
    trainer, plan = trained(Branching(), TRIED_ROWS)
    assert plan.guarantee.status == "conditional"
    assert plan.guarantee.reason.endswith(TRIED_ROWS)
    with pytest.warns(Notice, match="the guarantee is conditional on the model treating the rows"):
        assert float(trainer.sum(x, y, torch.arange(3), plan).values.norm()) <= 0.3
    assert type(plan).from_json(plan.layers, plan.to_json()).guarantee == plan.guarantee


def test_a_trial_with_many_and_hostile_rows_refuses_what_a_moderate_one_accepts():
    class OfMany(Branching):
        def after(self, outputs):
            return outputs - outputs.mean() if len(outputs) > 300 else outputs

    class OfLarge(Branching):
        def before(self, x):
            return x - x.mean() if bool(x.abs().max() > 1e3) else x

    x, y = torch.randn(12, FEATURES), torch.randint(3, (12,))
    for model in (OfMany(), OfLarge()):
        trainer, plan = trained(model, TRIED_ROWS)
        with pytest.raises(ConfigError, match="depend on the other examples"):
            trainer.sum(x, y, torch.arange(3), plan)


def test_models_of_known_layers_are_one_call_for_the_batch():
    known = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 2)))
    assert has_known_layers(known)
    for change in (
        lambda m: m.append(Net()),
        lambda m: m.append(nn.Flatten(0)),
        lambda m: m[1].register_forward_hook(doubled),
        lambda m: setattr(m[1], "forward", m[1].forward),
        lambda m: m.append(nn.BatchNorm1d(2)),
        lambda m: m.append(nn.GRU(2, 2)),
        lambda m: nn.utils.parametrizations.weight_norm(m[1]),
    ):
        other = nn.Sequential(nn.Flatten(), nn.Linear(4, 3), nn.ReLU())
        change(other)
        assert not has_known_layers(other)


@pytest.mark.parametrize(
    "name",
    [
        "logistic",
        "mlp",
        "cnn",
        "s-cnn",
        "d-cnn",
        "resnet18",
        "resnet20",
        "vgg16",
        "gru",
        "transformer",
    ],
)
def test_bundled_models_are_of_known_layers(name):
    from fedlgm.training import models

    shape = (12,) if name in ("gru", "transformer") else (3, 32, 32)
    assert has_known_layers(models.build(name, in_shape=shape, classes=10, seed=0))


def test_what_the_losses_keep_does_not_reach_another_row_or_step():
    torch.manual_seed(0)
    model, x, y = Net(), torch.randn(7, FEATURES), torch.randint(3, (7,))
    gradients = engine(model, Remembers())
    before = gradients.sum(x, y, FlatClip(BOUND)).total
    gradients.sum(1e4 * x, y, FlatClip(BOUND))
    assert torch.equal(gradients.sum(x, y, FlatClip(BOUND)).total, before)
    for order in itertools.islice(itertools.permutations(range(7)), 3):
        rows = torch.tensor(order)
        torch.testing.assert_close(gradients.sum(x[rows], y[rows], FlatClip(BOUND)).total, before)


def test_a_model_that_does_not_run_under_vmap_is_named_with_the_reason():
    model, x, y = Branching(), torch.randn(3, FEATURES), torch.tensor([0, 1, 2])
    gradients = ExampleGradients(model, LayerTable.from_module(model))
    with pytest.warns(Notice, match="data-dependent control flow"):
        gradients.sum(x, y, FlatClip(BOUND))
    assert isinstance(gradients._separation, TriedRows)


SEEN = []


class InAGlobal(Net):
    def before(self, x):
        SEEN.append(x.detach().mean())
        return x


class LossInAGlobal(Losses):
    def of(self, losses):
        SEEN.append(losses.detach().mean())
        return losses


@pytest.mark.parametrize(("model", "task"), [(InAGlobal, tasks.get), (Net, LossInAGlobal)])
def test_state_outside_of_a_model_and_its_task_is_a_condition(model, task):
    condition = engine(model(), task()).condition(torch.randn(3, FEATURES))
    assert condition.startswith(
        "conditional on no part of the model or task keeping what it has seen"
    )
    assert "share 'SEEN' of" in condition
    SEEN.clear()


WIDTH = 6


def unbatched(kind: str, rows: int, frozen: bool) -> nn.Sequential:
    """A model that takes all rows for the channels of one example if there are as many as
    channels."""
    first: nn.Module = {
        "linear": lambda: nn.Linear(rows, rows),
        "norm": lambda: nn.LayerNorm((rows, WIDTH)),
        "1d": lambda: nn.Conv1d(rows, rows, 1),
        "2d": lambda: nn.Conv2d(rows, rows, 1),
        "groups": lambda: nn.Conv1d(rows, rows, 1, groups=rows),
    }[kind]()
    first.requires_grad_(not frozen)
    size = {"linear": 1, "2d": WIDTH * WIDTH}.get(kind, WIDTH)
    return nn.Sequential(first, *([nn.Flatten()] if kind == "2d" else []), nn.Linear(size, 3))


def rows_of(kind: str, rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    shape = {"linear": (rows,), "2d": (rows, WIDTH, WIDTH)}.get(kind, (rows, WIDTH))
    return torch.randn(shape), torch.zeros(rows, dtype=torch.long)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("rows", [1, 2, 4, 32])
@pytest.mark.parametrize("kind", ["linear", "norm", "1d", "2d", "groups"])
def test_inputs_without_a_dimension_of_the_example_are_refused(kind, rows, frozen):
    """Also for equal rows, whose influence on each other no trial can see."""
    model, (x, y) = unbatched(kind, rows, frozen), rows_of(kind, rows)
    layers = LayerTable.from_module(model)
    for values in (x, torch.ones_like(x)):
        for size in (None, rows):
            gradients = ExampleGradients(model, layers, micro_batch=size)
            with pytest.raises(
                ConfigError, match=r"needs \d dimensions, the example first, but got \("
            ):
                gradients.sum(values, y, FlatClip(1.0))
            with pytest.raises(
                ConfigError, match=r"needs \d dimensions, the example first, but got \("
            ):
                gradients.condition(values)
        with pytest.raises(ConfigError, match=r"model: .*needs \d dimensions, the example first"):
            try_examples(model, layers, tasks.get(), values, y, type(model))


def test_inputs_are_checked_again_when_their_dimensions_change():
    model = nn.Sequential(
        nn.Conv1d(2, 2, 1).requires_grad_(False), nn.Flatten(), nn.Linear(2 * WIDTH, 3)
    )
    gradients = ExampleGradients(model, LayerTable.from_module(model), micro_batch=2)
    gradients.sum(torch.randn(2, 2, WIDTH), torch.zeros(2, dtype=torch.long), FlatClip(1.0))
    with pytest.raises(ConfigError, match=r"needs 3 dimensions"):
        gradients.sum(torch.randn(2, WIDTH), torch.zeros(2, dtype=torch.long), FlatClip(1.0))


@pytest.mark.parametrize("frozen", [False, True])
def test_a_layer_without_gradients_does_not_join_rows_either(frozen):
    class Channels(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.last = (
                nn.Conv1d(2, 2, 1).requires_grad_(not frozen),
                nn.Linear(WIDTH, 3),
            )

        def forward(self, x):
            with torch.no_grad():
                x = self.first(x)
            return self.last(x)

    model, x = Channels(), torch.randn(2, WIDTH)
    layers = LayerTable.from_module(model)
    gradients = ExampleGradients(model, layers, micro_batch=2)
    with pytest.raises(
        (ConfigError, RuntimeError), match=r"needs 3 dimensions|influence each other"
    ):
        gradients.sum(x, torch.zeros(2, dtype=torch.long), FlatClip(1.0))


def test_nothing_is_charged_for_inputs_without_a_dimension_of_the_example(tmp_path):
    for rows in (1, 2, 4, 32):
        model, (x, y) = unbatched("1d", rows, True), rows_of("1d", rows)
        facts = RunFacts(0.0, Sampling("poisson", rows, 0.5), rounds=2, epsilon=8.0, delta=1e-3)
        method = Method.of(model, mechanisms.get("dp-sgd"), facts)
        with Ledger(tmp_path / f"{rows}.sqlite", "training") as ledger:
            with pytest.raises(ConfigError, match=r"needs 3 dimensions, the example first"):
                train(model, x, y, method, keys=KeyRing.from_seed(1), ledger=ledger, lr=0.1)
            assert ledger.rounds() == 0


def dividing(x):
    return x / x.abs().max().clamp(min=10)


def with_a_replaced_part_of_forward():
    from torchvision.models import resnet18

    model = resnet18(num_classes=3, norm_layer=lambda width: nn.GroupNorm(4, width))
    implementation = model._forward_impl
    model._forward_impl = lambda x: implementation(
        dividing(x).view(-1, 1, 2, 3).expand(-1, 3, -1, -1)
    )
    return model


class OwnTensor(nn.Parameter):
    """A kind of tensor that divides by the largest input of the batch, as dynamic quantisation."""

    @classmethod
    def __torch_function__(cls, function, types, given=(), named=None):
        with torch._C.DisableTorchFunctionSubclass():
            if function is nn.functional.linear:
                given = (dividing(given[0]), *given[1:])
            out = function(*given, **(named or {}))
            return out.as_subclass(cls) if function is torch.Tensor.detach else out


def with_an_own_tensor():
    model = nn.Sequential(nn.Linear(FEATURES, 8), nn.Tanh(), nn.Linear(8, 3))
    model[0].weight = OwnTensor(model[0].weight.data)
    return model


def moved_by_an_outlier(gradients):
    """How far one outlying row moves the sum, in bounds."""
    x, y = torch.randn(40, FEATURES), torch.randint(3, (40,))
    one_more = torch.cat([x, 1e4 * torch.ones(1, FEATURES)]), torch.cat([y, y[:1]])
    sums = (gradients.sum(*batch, FlatClip(BOUND)).total for batch in ((x, y), one_more))
    return float((next(sums) - next(sums)).norm()) / BOUND


def test_a_known_layer_with_a_replaced_method_is_not_known():
    """Otherwise one outlying row would move the sum by up to 5.8 bounds, as "proven"."""
    torch.manual_seed(0)
    model = with_a_replaced_part_of_forward()
    assert not has_known_layers(model)
    gradients = engine(model)
    assert not gradients.condition(torch.randn(2, FEATURES))
    assert moved_by_an_outlier(gradients) <= 1 + 1e-4


class OwnWeight(OwnTensor):
    """The same, which is no parameter."""

    def __deepcopy__(self, memo):
        return self.data.clone().as_subclass(type(self))


def with_an_own_weight():
    model = with_an_own_tensor()
    weight = model[0].weight.data
    del model[0].weight
    model[0].weight = weight.as_subclass(OwnWeight)
    return model


@pytest.mark.parametrize("make", [with_an_own_tensor, with_an_own_weight])
@pytest.mark.parametrize("of_own", [False, True])
def test_layers_with_a_type_of_tensor_of_its_own_hold_one_row(make, of_own):
    """A rule multiplies the whole batch with it, and an outlier moved the sum by up to 2.8 bounds."""
    torch.manual_seed(0)
    model = nn.Sequential(make()) if of_own else make()
    assert not has_known_layers(model)
    gradients = engine(model)
    condition = gradients.condition(torch.randn(2, FEATURES))
    assert condition or moved_by_an_outlier(gradients) <= 1 + 1e-4


class Divide(torch.autograd.Function):
    """An operation with its own rule for vmap, which gets the whole batch."""

    @staticmethod
    def forward(x):
        return dividing(x)

    @staticmethod
    def setup_context(context, inputs, output):
        """Nothing is kept."""

    @staticmethod
    def backward(context, gradient):
        return gradient

    @staticmethod
    def vmap(info, dims, x):
        return dividing(x), dims[0]


class OwnRule(Net):
    def before(self, x):
        return Divide.apply(x)


class OwnRuleOfLosses(Losses):
    def of(self, losses):
        return Divide.apply(losses)


@pytest.mark.parametrize(("model", "task"), [(OwnRule(), None), (Net(), OwnRuleOfLosses())])
def test_a_rule_for_vmap_of_a_user_is_a_condition(model, task):
    condition = engine(model, task).condition(torch.randn(2, FEATURES))
    assert condition.startswith("conditional on no rule for vmap joining rows")
    assert condition.endswith("Divide has its own")
