"""Objects by name: the library's own, registered ones, references, and names that are refused."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest

from fedlgm.errors import ConfigError
from fedlgm.extension.registration import _repeating
from fedlgm.extension.registry import Registry


@pytest.fixture
def functions() -> Registry[Any]:
    return Registry(
        "function", {"root": math.sqrt, "power": "math:pow"}, "a button of a calculator"
    )


def test_a_name_a_lazy_name_and_a_reference_are_found(functions: Registry[Any]) -> None:
    assert functions.names() == ("root", "power")
    assert functions.find("root") is math.sqrt
    assert functions.find("power") is math.pow
    assert functions.find("math:sin") is math.sin
    assert functions.items()[1] == ("power", "math:pow")


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("rooot", "unknown function 'rooot'; did you mean 'root'"),
        (
            "sine",
            r"unknown function 'sine'; known: root, power, or a button of a calculator, or your own",
        ),
        (math.sin, "function '<sin>' is an object: register it and pass its name"),
        ("math:sine", "function 'math:sine': module 'math' has no 'sine'"),
        ("nowhere:sine", "function 'nowhere:sine': module 'nowhere' cannot be imported"),
        (3, "unknown function 3"),
        (["root"], r"unknown function \['root'\]"),
    ],
)
def test_other_names_are_refused(functions: Registry[Any], name: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        functions.find(name)


def _defined() -> Any:
    @dataclass(frozen=True)
    class Kind:
        value: int = 1

    Kind.__qualname__ = "Kind"
    return Kind


def test_a_name_belongs_to_one_object_which_may_be_defined_again(functions: Registry[Any]) -> None:
    first, again = _defined(), _defined()
    functions.add("kind", first)
    functions.add("kind", again)
    assert functions.find("kind") is again
    for other in (math.cos, lambda: 0, "math:cos"):
        with pytest.raises(ConfigError, match="there is a function 'kind' already: choose another"):
            functions.add("kind", other)
    assert functions.find("kind") is again
    with pytest.raises(ConfigError, match="the name of a function must be a string, got 3"):
        functions.add(3, math.cos)  # type: ignore[arg-type]
    before = _repeating.set(True)  # another process's registrations replace those of this one
    try:
        functions.add("kind", math.cos)
    finally:
        _repeating.reset(before)
    assert functions.find("kind") is math.cos


def test_registries_do_not_share_what_they_were_made_from() -> None:
    own = {"root": math.sqrt}
    first, second = Registry("function", own), Registry("function", own)
    first.add("sine", math.sin)
    assert ("sine" in first, "sine" in second, "sine" in own) == (True, False, False)
    assert 3 not in first
    assert ["root"] not in first


def test_a_function_must_take_its_arguments(functions: Registry[Any]) -> None:
    assert functions.find_function("power", "(a, b) -> a^b", 1, 2) is math.pow
    with pytest.raises(ConfigError, match=r"function 'math:pi' must be a function \(a\) -> b: it"):
        functions.find_function("math:pi", "(a) -> b", 1)
    functions.add("none", lambda: 0)
    with pytest.raises(ConfigError, match=r"function 'none' must be a function .* too many"):
        functions.find_function("none", "(a) -> b", 1)
