from __future__ import annotations

import hashlib
import math
import sys
from functools import partial
from pathlib import Path

import pytest
import torch

from fedlgm.errors import ConfigError, DataError, PrivacyError
from fedlgm.extension.loader import is_reference, load_object, misfit, source_of, users_code


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current directory; what is imported from it is forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    before = set(sys.modules)
    yield tmp_path
    for name in set(sys.modules) - before:
        del sys.modules[name]


def test_objects_are_found_by_their_dotted_name() -> None:
    assert load_object("math:sqrt", "function") is math.sqrt
    assert load_object("pathlib:Path.cwd", "function")() == Path.cwd()
    assert is_reference("a.b:C")
    assert not any(map(is_reference, ("mlp", "a.b", 3, None)))


def test_modules_beside_the_user_are_found(here: Path) -> None:
    (here / "my_things.py").write_text("class Net:\n    depth = 3\n")
    assert load_object("my_things:Net.depth", "model") == 3
    path, digest = source_of("my_things:Net", "model")
    assert path is not None
    assert path.name == "my_things.py"
    assert digest == hashlib.sha256((here / "my_things.py").read_bytes()).hexdigest()
    assert (
        source_of("math:sqrt", "function")[1] is None or math.__file__
    )  # a compiled module may have no source


@pytest.mark.parametrize(
    ("source", "reference", "message"),
    [
        ("", "my_things", r"model 'my_things': name your own object as 'package.module:name'"),
        ("", "my_things:", r"as 'package.module:name'"),
        ("", "my things:Net", r"as 'package.module:name'"),
        (
            "",
            "my_absent_things:Net",
            r"model 'my_absent_things:Net': module .* there is no module 'my_absent_things'",
        ),
        ("", "my_things.deeper:Net", r"module 'my_things.deeper' cannot be imported"),
        (
            "import surely_absent",
            "my_things:Net",
            r"it imports 'surely_absent', which is not installed",
        ),
        ("def f(:", "my_things:Net", r"module 'my_things' cannot be imported: SyntaxError"),
        ("raise OSError('no disk')", "my_things:Net", r"cannot be imported: OSError: no disk"),
        ("import numpy as np", "my_things:nope", r"module 'my_things' has no 'nope'$"),
        (
            "class Nett: pass",
            "my_things:Net",
            r"module 'my_things' has no 'Net'; did you mean 'Nett'\?",
        ),
    ],
)
def test_what_does_not_import_is_refused_with_module_and_reason(
    here: Path, source: str, reference: str, message: str
) -> None:
    (here / "my_things.py").write_text(source)
    with pytest.raises(ConfigError, match=message):
        load_object(reference, "model")


def _raise(error: BaseException) -> None:
    raise error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (ValueError("3 is odd\nsecond line"), "ValueError: 3 is odd"),
        (TypeError("no such argument"), "TypeError: no such argument"),
        (StopIteration(), "StopIteration: "),  # which a generator would take for its own end
        (AssertionError(), "AssertionError: "),
        (RuntimeError("size mismatch"), "RuntimeError: size mismatch"),
    ],
)
def test_an_error_of_a_users_code_is_one_line_with_its_place(
    error: Exception, message: str
) -> None:
    line = _raise.__code__.co_firstlineno + 1
    with pytest.raises(ConfigError) as raised, users_code("model 'mine'", _raise):
        _raise(error)
    assert str(raised.value) == f"model 'mine': {message} (test_loader.py, line {line})"
    assert raised.value.__cause__ is error


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("depth must be at least 1"),
        PrivacyError("a bound is missing"),
        MemoryError("not enough memory for 3 GB"),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 4 bytes"),
        KeyboardInterrupt(),
        SystemExit(143),
    ],
)
def test_messages_memory_and_interruptions_pass_unchanged(error: BaseException) -> None:
    with pytest.raises(type(error)) as raised, users_code("model 'mine'", _raise):
        _raise(error)
    assert raised.value is error


def test_the_caller_says_which_error_it_is_and_objects_have_their_class_s_place() -> None:
    class Net:
        def __call__(self) -> None:
            raise ValueError("no")

    line = Net.__call__.__code__.co_firstlineno + 1
    for found in (Net, Net(), partial(_raise, ValueError("no")), partial(partial(Net()))):
        message = r"^data set 'mine': ValueError: no \(test_loader.py, line \d+\)$"
        with (
            pytest.raises(DataError, match=message),
            users_code("data set 'mine'", found, DataError),
        ):
            found()() if isinstance(found, type) else found()
    with pytest.raises(ConfigError, match=rf"line {line}\)$"), users_code("x", Net()):
        Net()()
    with pytest.raises(ConfigError, match=r"^x: ValueError: [a-z ]+$"), users_code("x", math.sqrt):
        math.sqrt(-1)  # compiled: it has no line


def test_arguments_that_do_not_fit_are_found_without_a_call() -> None:
    def made(lr: float, *, momentum: float) -> None:
        raise AssertionError("called")

    assert misfit(made, 0.1) == "missing a required argument: 'momentum'"
    assert misfit(made, 0.1, momentum=0.2) == ""
    assert (
        misfit(made, 0.1, nesterov=True, momentum=0.2)
        == "got an unexpected keyword argument 'nesterov'"
    )
    assert (
        misfit(type("Class", (), {"__init__": lambda self, depth: None}))
        == "missing a required argument: 'depth'"
    )
    assert misfit(iter, 1, 2, 3) == ""  # Python does not know its parameters
