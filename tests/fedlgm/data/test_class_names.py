"""Classes by name or number."""

from __future__ import annotations

import numpy as np
import pytest

from fedlgm.data import DataSet, divide
from fedlgm.data.class_names import PUBLISHED, class_number
from fedlgm.data.sources import FILE_SETS
from fedlgm.errors import ConfigError


def named(name: str, classes: int = 10, labels: tuple[str, ...] | None = None) -> DataSet:
    y = np.arange(4 * classes) % classes
    x = np.zeros((len(y), 2))
    return DataSet.from_arrays((x, y), (x, y), name=name, labels=labels)


def test_published_sets_have_a_name_for_every_class() -> None:
    for name, names in PUBLISHED.items():
        assert len(names) == len(set(names)) == FILE_SETS[name].classes
    assert PUBLISHED["cifar100"] == tuple(sorted(PUBLISHED["cifar100"]))


@pytest.mark.parametrize(
    ("name", "given", "number"),
    [
        ("cifar10", "bird", 2),
        ("cifar10", 2, 2),
        ("cifar10", "2", 2),
        ("fashion-mnist", "Ankle boot", 9),
        ("fashion-mnist/public", "Coat", 4),
        ("digits", "5", 5),
    ],
)
def test_a_class_is_a_name_or_a_number(name: str, given: int | str, number: int) -> None:
    assert class_number(named(name), given) == number


def test_a_set_s_own_names_come_before_numbers() -> None:
    data = named("own", 2, ("1", "0"))
    assert [class_number(data, given) for given in ("0", 0)] == [1, 0]


@pytest.mark.parametrize(
    ("name", "given", "said"),
    [
        ("cifar10", "brid", "did you mean 'bird'"),
        ("cifar10", "tree", "known: airplane, .*, or cifar10 has numbers"),
        ("digits", "bird", "digits has numbers from 0 to 9"),
        ("digits", 10, "numbers from 0 to 9"),
        ("digits", -1, "numbers from 0 to 9"),
        ("digits", True, "numbers from 0 to 9"),
    ],
)
def test_others_are_refused_with_what_there_is(name: str, given: int | str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        class_number(named(name), given)


def test_isolation_hides_a_class_by_its_name() -> None:
    data = named("cifar10")
    for scheme in ("isolation", "isolation-i", "isolation-ii"):
        by_name = divide(data, 4, scheme, private_class="bird")
        by_number = divide(data, 4, scheme, private_class=2)
        assert all(np.array_equal(a, b) for a, b in zip(by_name, by_number, strict=True))
        assert 2 not in data.train_y[by_name[3]]
    with pytest.raises(ConfigError, match=r"^private_class: no class.*did you mean 'bird'"):
        divide(data, 4, "isolation", private_class="brid")
