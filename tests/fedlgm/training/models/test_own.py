"""Models of a user's own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from fedlgm.errors import ConfigError, Notice
from fedlgm.training.models import build, options
from fedlgm.training.models.requirements import require_seen_gradients, require_trainable


class Net(nn.Module):
    def __init__(self, hidden: int = 3, depth: int = 1) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(nn.Linear(hidden, hidden) for _ in range(depth)))


def fitted(in_shape: tuple[int, ...], classes: int, *, bias: bool = True) -> nn.Module:
    return nn.Sequential(nn.Flatten(), nn.Linear(in_shape[0], classes, bias=bias))


def own(model: Any, seed: int = 0, **values: Any) -> nn.Module:
    return build(model, in_shape=(4,), classes=2, seed=seed, **values)


def weights(module: nn.Module) -> torch.Tensor:
    return torch.cat([p.detach().flatten() for p in module.parameters()])


def test_classes_and_functions_are_called_with_the_recipes_options() -> None:
    assert len(own(Net, depth=2).layers) == 2  # type: ignore[arg-type]
    assert own(fitted)[1].weight.shape == (2, 4)  # type: ignore[index, union-attr]
    assert own(fitted, bias=False)[1].bias is None  # type: ignore[index, union-attr]
    assert own("torch.nn:Linear", in_features=4, out_features=2).weight.shape == (2, 4)
    assert "out_features" in options("torch.nn:Linear")
    assert options("fedlgm.training.models.dense:mlp") == ("hidden", "activation")


def test_weights_are_the_seeds() -> None:
    torch.manual_seed(1)
    before = torch.get_rng_state()
    assert torch.equal(weights(own(Net, 5)), weights(own(Net, 5)))
    assert not torch.equal(weights(own(Net, 5)), weights(own(Net, 6)))
    assert torch.equal(torch.get_rng_state(), before)


def test_modules_are_copied_with_their_weights() -> None:
    module = nn.Linear(4, 2)
    copy = own(module, seed=3)
    assert copy is not module
    assert torch.equal(weights(copy), weights(module))
    with torch.no_grad():
        copy.weight.zero_()  # type: ignore[operator]
    assert module.weight.abs().sum() > 0
    with torch.device("meta"):
        assert own(module).weight.device.type == "meta"  # type: ignore[union-attr]


@pytest.mark.parametrize(
    ("model", "values", "message"),
    [
        (
            "absent.models:Net",
            {},
            r"model 'absent.models:Net': module 'absent.models' cannot be imported",
        ),
        ("torch.nn:Lineal", {}, r"has no 'Lineal'; did you mean 'Linear'\?"),
        ("math:pi", {}, r"model 'math:pi' is neither an nn.Module nor a class or function"),
        ("builtins:dict", {}, r"model 'builtins:dict'"),
        (Net, {"width": 3}, r"model 'Net': unknown option 'width'; its options: hidden, depth"),
        ("torch.nn:Linear", {"in_features": 4}, r"missing a required argument: 'out_features'"),
        (
            nn.Linear(4, 2),
            {"bias": True},
            r"model 'Linear' is a module already: it takes no options, got bias",
        ),
        (nn.ReLU, {}, r"model 'ReLU' has no trainable parameters"),
        (nn.Linear(4, 2).requires_grad_(False), {}, r"model 'Linear' has no trainable parameters"),
        (
            nn.Linear(4, 2).half(),
            {},
            r"parameter 'weight' is torch.float16, but trained parameters must be float32",
        ),
        (nn.LazyLinear(2), {}, r"parameter 'weight' has no size before the first forward pass"),
        (nn.BatchNorm2d(3), {}, r"buffer 'running_mean' .* GroupNorm in place of BatchNorm"),
        (lambda: None, {}, r"must be an nn.Module, but it is of type NoneType"),
    ],
)
def test_what_cannot_be_trained_is_refused(
    model: Any, values: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        own(model, **values)


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
@pytest.mark.parametrize("given", ["module", "class"])
def test_hooks_of_parameters_that_would_not_run_are_refused(given: str, register: str) -> None:
    """A copy of a module has none of them, and no trainer accumulates gradients in parameters."""

    class Hooked(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 2)
            getattr(self.weight, register)(lambda value: None)

    if given == "class" and register == "register_hook":
        assert own(
            Hooked
        ).weight._backward_hooks  # trainers of one client at a time run it, the others refuse it
        return
    with pytest.raises(
        ConfigError, match=r"a gradient hook of parameter 'weight' would not run, because"
    ):
        own(Hooked() if given == "module" else Hooked)


def broken(in_shape: tuple[int, ...]) -> nn.Module:
    return nn.Linear(in_shape[0], "three")  # type: ignore[arg-type]


def headed(classes: int = 1) -> nn.Module:
    return nn.Linear(4, classes)


def test_an_error_of_a_users_function_is_one_message_that_says_where() -> None:
    with pytest.raises(
        ConfigError, match=r"model 'broken': TypeError.* \(test_own.py, line \d+\)$"
    ) as error:
        own(broken)
    assert isinstance(error.value.__cause__, TypeError)


def test_a_number_of_outputs_that_nobody_says() -> None:
    with pytest.raises(
        ConfigError, match=r"model 'fitted' takes `classes`.*Task.outputs.*a default"
    ):
        build(fitted, in_shape=(4,), classes=None)
    assert build(headed, in_shape=(4,), classes=None).weight.shape == (1, 4)  # type: ignore[union-attr]


def test_layers_without_state_are_welcome() -> None:
    own(
        nn.Sequential(
            nn.BatchNorm1d(4, track_running_stats=False), nn.Dropout(0.5), nn.GroupNorm(2, 4)
        )
    )


@pytest.mark.parametrize(
    "hold", [list, tuple, lambda layers: dict(enumerate(layers)), lambda layers: [layers]]
)
def test_layers_that_python_hides_are_noticed(hold: Any) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model[0].experts = hold([nn.Linear(3, 3)])
    with pytest.warns(
        Notice,
        match=r"the layers in '0\.experts' are not trained, because a plain (list|tuple|dict) hides",
    ):
        require_trainable(model)


def test_layers_that_are_also_registered_are_not_noticed(recwarn: pytest.WarningsRecorder) -> None:
    model = nn.Sequential(nn.Linear(3, 3))
    model.order = [model[0], nn.ReLU()]
    require_trainable(model)
    assert not recwarn.list


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.unused, self.out = (nn.Linear(4, 4) for _ in range(3))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> Any:
        x = x.clone().requires_grad_()
        return self.out(checkpoint(self.inner, x, use_reentrant=self.reentrant))


def test_layers_whose_gradients_training_does_not_see_are_refused() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(ConfigError, match=r"'inner\.weight'.*would stay untrained"):
        require_seen_gradients(Checkpointed(reentrant=True), x)
    require_seen_gradients(Checkpointed(reentrant=False), x)  # one layer is not used, as is usual
