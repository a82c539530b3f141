"""Data of a user's own, and their division by anything that a recipe may name."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pandas
import pytest
import torch

import simulations
from fedlgm.data import DataSet, Partition, divide, load, scheme_options
from fedlgm.errors import ConfigError, DataError, Notice

RNG = np.random.default_rng(4)
X, Y = RNG.standard_normal((60, 3)), RNG.integers(4, size=60)
ARRAYS = {"train": (X, Y), "test": (X[:9], Y[:9])}
LABELLED = DataSet.from_mapping({**ARRAYS, "users": [f"user {i % 7}" for i in range(60)]})
REAL = DataSet.from_mapping({"train": (X, X[:, 0]), "test": (X, X[:, 0])})


def test_arrays_become_a_data_set() -> None:
    data = DataSet.from_mapping(
        {**ARRAYS, "clients": [[0, 5, 2], [], np.array([7])], "name": "mine"}
    )
    assert (data.name, data.shape, data.classes) == ("mine", (3,), int(Y[:9].max()) + 1)
    assert data.train_x.dtype == np.float32  # type: ignore[union-attr]
    assert data.train_y.dtype == np.int64
    assert data.clients is not None
    assert [client.tolist() for client in data.clients] == [[0, 2, 5], [], [7]]
    assert REAL.classes is None
    assert DataSet.from_mapping({**ARRAYS, "classes": 11}).classes == 11
    assert LABELLED.train_user is not None
    assert LABELLED.train_user[:9].tolist() == [0, 1, 2, 3, 4, 5, 6, 0, 1]


def test_several_inputs_of_any_shape() -> None:
    tokens, image = np.zeros((4, 9), np.uint16), np.ones((4, 2, 3, 5, 7), np.float16)
    data = DataSet.from_mapping(
        {"train": ((tokens, image), np.ones((4, 2))), "test": ((tokens, image), np.ones((4, 2)))}
    )
    assert data.shape == ((9,), (2, 3, 5, 7))
    assert [array.dtype.name for array in data.train_x] == ["int64", "float32"]


def test_own_sets_are_loaded_from_objects_functions_and_dotted_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(LABELLED)
    assert all(
        getattr(loaded, field) is getattr(LABELLED, field)
        for field in ("name", "train_x", "train_y", "test_x")
    )
    assert load(lambda: ARRAYS).shape == (3,)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    (tmp_path / "my_sets.py").write_text(
        "import numpy as np\nx = np.ones((4, 2))\nwrong = 3\n"
        "def make():\n    return {'train': (x, x), 'test': (x, x)}\n"
    )
    assert load("my_sets:make").shape == (2,)
    for name, message in {
        "my_sets:wrong": r"data set 'my_sets:wrong' must be a fedlgm.data.DataSet or .*, not an object of type int",
        "my_sets:x": r"not an object of type ndarray",
    }.items():
        with pytest.raises(DataError, match=message):
            load(name)
    with pytest.raises(
        ConfigError, match=r"data set 'my_sets:absent': module 'my_sets' has no 'absent'"
    ):
        load("my_sets:absent")
    with pytest.raises(DataError, match=r"missing 1 required positional argument"):
        load(lambda needed: ARRAYS)


def changed(**changes: Any) -> dict[str, Any]:
    return {**ARRAYS, **changes}


HOLES = X.copy()
HOLES[4, 1] = np.nan


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (changed(train=(X, Y[:-1])), r"training data: 60 inputs but 59 targets"),
        (changed(train=((X, X[:5]), Y)), r"training data: 60, 5 inputs but 60 targets"),
        (
            changed(train=(HOLES, Y)),
            r"training inputs: 1 values are NaN or infinite, the first at index \(4, 1\)",
        ),
        (changed(train=(X, np.full(60, np.nan))), r"training targets: 60 values are NaN"),
        (
            changed(test=(X[:, :2], Y)),
            r"test: its arrays .* are not like the training set's .*only their lengths",
        ),
        (changed(test=(X[:0], Y[:0])), r"at least one test example"),
        (
            changed(train=X),
            r"training data must be a pair of arrays \(inputs, targets\), got a ndarray",
        ),
        (changed(train=([[1, 2], [3]], [0, 1])), r"training inputs: not an array of numbers"),
        (
            changed(train=([[1.0]], ["cat"])),
            r"training targets are names, but the targets of the other part are not: both parts need",
        ),
        (changed(train=(np.array(["a"]), [0])), r"training inputs must be an array of numbers"),
        (changed(train=(X + 1j, Y)), r"are complex"),
        (changed(label=Y), r"unknown key 'label'; its keys: train, test, clients"),
        (
            changed(labels=["a", "b", "a"]),
            r"labels: must name two or more classes, each once, got a, b, a",
        ),
        (
            changed(labels=["a", "b", "c"]),
            r"data\.labels: \d+ training targets, .* none of the classes .*a, b, c",
        ),
        (changed(labels=list("abcd"), classes=3), r"classes = 3, but labels names 4: a, b, c, d"),
        ({"train": (X, Y)}, r"key 'test' is missing"),
        (changed(clients=[]), r"clients: there must be at least one"),
        (changed(clients=[[0, 60]]), r"clients\[0\] names samples outside \[0, 60\)"),
        (changed(clients=[[-1]]), r"outside \[0, 60\)"),
        (changed(clients=[[0], [1, 0]]), r"clients\[1\] names sample 0, which is named before"),
        (changed(clients=[[1, 1]]), r"clients\[0\] names sample 1, which is named before"),
        (changed(clients=[[0.5]]), r"clients\[0\] must be a list of sample numbers"),
        (changed(clients=[[0]], users=Y), r"clients and users: pass at most one"),
        (changed(users=Y[:3]), r"users must name the user of each of the 60"),
        (
            changed(users=[None if i % 2 else "a" for i in range(60)]),
            r"users: 30 of 60 rows have no user",
        ),
        (
            changed(users=np.array([1, "a"] * 30, dtype=object)),
            r"users must all be numbers or all be names",
        ),
        (changed(users=["a", math.nan, *["b"] * 58]), r"users: 1 of 60 rows have no user"),
        (changed(users=["1", 1.0, *["2"] * 58]), r"users must all be numbers or all be names"),
        (
            changed(users=["a", " ", *["b"] * 58]),
            r"users: training examples with the name ' ' have no user",
        ),
        (changed(users=HOLES[:, 1]), r"users: 1 of 60 rows have no user"),
        (
            changed(train=({"a": X, "b": X}, Y)),
            r"training inputs: several inputs are a tuple .*, not a dict",
        ),
        (changed(train=([X, X], Y)), r"2 inputs but 60 targets; .*several inputs are a tuple"),
        (changed(train=(X[:0], Y[:0])), r"at least one training example"),
        (changed(train=(1e300 * X, Y)), r"training inputs: 180 values are too large for float32"),
        (
            changed(train=(np.full((60, 3), 2**63, np.uint64), Y)),
            r"more than signed 64-bit integers",
        ),
        (changed(classes="4"), r"classes must be a whole number of at least 1, got '4'"),
        (
            changed(clients={"a": [0]}),
            r"clients: give a list of sample numbers for each client, not a dict",
        ),
        (changed(clients=[{0, 1}]), r"clients\[0\] must be a list of sample numbers, got set"),
        (changed(clients=[[], []]), r"clients: none of them has an example"),
    ],
)
def test_what_is_wrong_with_arrays_is_said(arrays: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        DataSet.from_mapping(arrays)


@pytest.mark.parametrize(
    "given",
    [
        torch.from_numpy(X).requires_grad_(),
        torch.from_numpy(X).to_sparse(),
        [torch.from_numpy(row) for row in X],
        X.tolist(),
        np.asfortranarray(X),
    ],
)
def test_arrays_may_be_tensors_or_lists(given: Any) -> None:
    data = DataSet.from_mapping(changed(train=(given, torch.from_numpy(Y))))
    assert np.array_equal(data.train_x, X.astype(np.float32))
    assert np.array_equal(data.train_y, Y)


def test_tensors_of_half_precision_are_read() -> None:
    for kind in (torch.bfloat16, torch.float16):
        data = DataSet.from_mapping(changed(train=(torch.from_numpy(X).to(kind), Y)))
        assert np.allclose(data.train_x, X, rtol=1e-2)


def test_a_set_that_was_not_made_of_arrays_is_checked_when_it_is_loaded() -> None:
    held = X.astype(np.float32)
    doubled = load(DataSet("mine", X, Y, X, Y, 4, np.arange(60) % 7))
    assert (doubled.name, doubled.train_x.dtype, doubled.classes) == ("mine", np.float32, 4)  # type: ignore[union-attr]
    for wrong, message in (
        (DataSet("mine", held, Y[:-1], held, Y), "60 inputs but 59 targets"),
        (DataSet("mine", np.full_like(held, np.nan), Y, held, Y), "180 values are NaN"),
        (
            DataSet("mine", held, Y, held, Y, clients=Partition(np.arange(90), np.array([0, 90]))),
            "outside",
        ),
    ):
        with pytest.raises(DataError, match=message):
            load(wrong)


def test_many_clients_are_read_at_once() -> None:
    found = Partition.from_clients([[i] for i in range(20_000)], 60_000)
    assert len(found) == 20_000


def test_a_file_that_a_function_misses_is_one_message_with_its_line() -> None:
    with pytest.raises(DataError, match=r"FileNotFoundError: .*/nowhere.npy.* \(test_own.py, line"):
        load(lambda: np.load("/nowhere.npy"))


def whole(found: Partition, examples: int = 60) -> bool:
    return sorted(found.order.tolist()) == list(range(examples))


def test_natural_clients_are_the_sets_own() -> None:
    own = DataSet.from_mapping(changed(clients=[[0, 1], [5]]))
    assert divide(own, 2, "natural") is own.clients
    with pytest.raises(
        ConfigError, match=r"'own' has 2 clients of its own, but federation.clients is 3"
    ):
        divide(own, 3, "natural")
    assert divide(LABELLED, 7, "natural").sizes.tolist() == [9, 9, 9, 9, 8, 8, 8]
    with pytest.raises(
        ConfigError, match=r"'natural' needs a set with clients or users of its own: 'own' has none"
    ):
        divide(REAL, 3, "natural")


def test_labels_are_needed_only_where_a_scheme_divides_by_them() -> None:
    assert whole(divide(REAL, 7, "iid", seed=3))
    with pytest.raises(
        ConfigError,
        match=r"'dirichlet' divides by integer labels \[n\], but the targets .* float32",
    ):
        divide(REAL, 7, "dirichlet", alpha=0.5)


@pytest.mark.parametrize(
    ("scheme", "options", "clients"),
    [
        ("ExponentialPartitioner", {}, 3),
        ("flwr_datasets.partitioner:LinearPartitioner", {}, 4),
        ("DirichletPartitioner", {"alpha": 5.0, "min_partition_size": 0}, 4),
        ("InnerDirichletPartitioner", {"partition_sizes": [20, 25, 15], "alpha": 1.0}, 3),
        ("SizePartitioner", {"partition_sizes": [20, 25, 15]}, 3),
        ("NaturalIdPartitioner", {"partition_by": "user"}, 7),
        (
            "GroupedNaturalIdPartitioner",
            {"partition_by": "user", "group_size": 3, "mode": "allow-smaller"},
            3,
        ),
    ],
)
def test_partitioners_of_flwr_datasets_by_name(
    scheme: str, options: dict[str, Any], clients: int
) -> None:
    found = divide(LABELLED, clients, scheme, seed=5, **options)
    assert len(found) == clients
    assert whole(found)
    again = divide(LABELLED, clients, scheme, seed=5, **options)
    assert np.array_equal(found.order, again.order)
    assert np.array_equal(found.offsets, again.offsets)
    known = scheme_options(scheme)
    assert set(options) <= set(known)
    assert "num_partitions" not in known


def test_partitioner_objects_and_classes_and_real_targets() -> None:
    from flwr_datasets.partitioner import ContinuousPartitioner, SizePartitioner

    partitioner = SizePartitioner([40, 20])
    for _ in range(2):  # the object itself stays unused
        assert divide(LABELLED, 2, partitioner).sizes.tolist() == [40, 20]
    sorted_by_target = divide(REAL, 3, ContinuousPartitioner, strictness=1.0)
    middle = [REAL.train_y[client].mean() for client in sorted_by_target]
    assert max(middle) - min(middle) > 1


def halves(data: DataSet, clients: int, seed: int, *, odd_first: bool = False) -> list[Any]:
    order = np.random.default_rng(seed).permutation(len(data.train_y))
    return np.array_split(order[::-1] if odd_first else order, clients)


def test_a_function_divides() -> None:
    found = divide(LABELLED, 4, halves, seed=2, odd_first=True)
    assert whole(found)
    assert found.sizes.tolist() == [15] * 4


@pytest.mark.parametrize(
    ("scheme", "options", "error", "message"),
    [
        (
            "NoSuchPartitioner",
            {},
            ConfigError,
            r"module 'flwr_datasets.partitioner' has no 'NoSuchPartitioner'",
        ),
        (
            "no_such_module:divide",
            {},
            ConfigError,
            r"partition scheme 'no_such_module:divide': module",
        ),
        (
            "math:pi",
            {},
            ConfigError,
            r"is neither one of iid, .* nor a Partitioner of flwr-datasets",
        ),
        (
            "SizePartitioner",
            {"partition_sizes": [30, 40]},
            ConfigError,
            r"'SizePartitioner' cannot divide 60 samples",
        ),
        ("SizePartitioner", {"sizes": [30]}, ConfigError, r"cannot divide .*: TypeError"),
        (
            "NaturalIdPartitioner",
            {"partition_by": "user"},
            ConfigError,
            r"makes 7 clients, but federation.clients is 2",
        ),
        (
            lambda data, clients, seed: [[0]],
            {},
            ConfigError,
            r"makes 1 clients, but federation.clients is 2",
        ),
        (
            lambda data, clients, seed: [[0], [0]],
            {},
            DataError,
            r"names sample 0, which is named before",
        ),
        (object(), {}, ConfigError, r"partition scheme '<object>' is neither one of iid"),
        (
            lambda data, clients, seed: None,
            {},
            ConfigError,
            r"partition scheme '<lambda>': TypeError: 'NoneType'",
        ),
        (
            lambda data, clients, seed: [][0],
            {},
            ConfigError,
            r"IndexError: .*\(test_own.py, line \d+\)",
        ),
        (
            lambda data, clients, seed: {0: [0], 1: [1]},
            {},
            DataError,
            r"a list of sample numbers for each client",
        ),
        (
            lambda *_: Partition(np.arange(90), np.array([0, 45, 90])),
            {},
            DataError,
            r"clients\[1\] names samples out",
        ),
        (
            halves,
            {"even": True},
            ConfigError,
            r"partition scheme '<halves>': .*unexpected keyword argument 'even'",
        ),
    ],
)
def test_divisions_that_do_not_work_are_refused(
    scheme: Any, options: Any, error: type, message: str
) -> None:
    with pytest.raises(error, match=message):
        divide(LABELLED, 2, scheme, **options)


@pytest.mark.slow
def test_schemes_of_our_own_do_not_import_flwr_datasets() -> None:
    program = (
        "import sys, numpy as np\nfrom fedlgm import data\nx = np.zeros((60, 2)); y = "
        "np.arange(60) % 3\n"
        "own = data.load({'train': (x, y), 'test': (x, y), 'users': y})\n"
        "data.divide(own, 3, 'natural'); data.divide(own, 3, 'dirichlet-large', alpha=1.0)\n"
        "print('flwr_datasets' in sys.modules, 'datasets' in sys.modules)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "False"]


@pytest.mark.slow
def test_partitioners_come_without_plotting_and_the_rest_of_their_package_when_it_is_asked_for() -> (
    None
):
    program = (
        "import sys, numpy as np\nfrom fedlgm import data\n"
        "data.partition(np.arange(60) % 3, 4, 'dirichlet', alpha=1.0)\n"
        "print('flwr_datasets' in sys.modules, 'seaborn' in sys.modules, 'matplotlib' in "
        "sys.modules)\n"
        "import flwr_datasets\nfrom flwr_datasets import FederatedDataset\nimport "
        "flwr_datasets.partitioner\n"
        "from fedlgm.data.partitioners import partitioners\n"
        "print(flwr_datasets.partitioner.IidPartitioner is partitioners().IidPartitioner, "
        "flwr_datasets.__version__)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    first, second = done.stdout.splitlines()
    assert first.split() == ["True", "False", "False"]
    assert second.split()[0] == "True"
    assert second.split()[1][0].isdigit()


@pytest.mark.parametrize("other", ["Ann", "ann ", " ann", "a\uff4en"])
def test_two_spellings_of_one_user_are_pointed_out(other):
    """A person with two names is two units, for which no epsilon is stated."""
    with pytest.warns(Notice, match="count as two users: if they are one person, use one name"):
        DataSet.from_mapping({**ARRAYS, "users": [other if i % 2 else "ann" for i in range(60)]})


class TestValuesThatAreNotThere:
    """Masks and NaT mean absence: an array without them would hold other values."""

    X = np.ma.masked_equal(np.array([[52.0, -9999.0], [40.0, 1.0]]), -9999.0)

    @pytest.mark.parametrize(
        ("pair", "message"),
        [
            ((X, [0, 1]), "training inputs"),
            ((np.zeros((2, 1)), np.ma.masked_equal([0, 9], 9)), "training targets"),
            (([X[0], X[1]], [0, 1]), "training inputs"),
        ],
    )
    def test_masked_values_are_refused(self, pair, message):
        with pytest.raises(
            DataError, match=rf"{message}: 1 values are masked: leave out their rows, or fill them"
        ):
            DataSet.from_arrays(pair, (np.zeros((2, 2)), [0, 1]))

    def test_an_empty_mask_is_no_fault(self):
        x = np.ma.masked_equal(np.ones((2, 2)), -9999.0)
        assert DataSet.from_arrays((x, [0, 1]), (x, [0, 1])).train_x.tolist() == [[1, 1], [1, 1]]

    def test_masked_users_and_times_that_are_not_are_no_users(self):
        x, y = np.zeros((2, 2)), [0, 1]
        with pytest.raises(DataError, match=r"users: 1 values are masked"):
            DataSet.from_arrays((x, y), (x, y), users=np.ma.masked_equal([1, 9], 9))
        with pytest.raises(DataError, match=r"users: 1 of 2 rows have no user"):
            DataSet.from_arrays(
                (x, y), (x, y), users=np.array(["2024-01-01", "NaT"], dtype="datetime64[D]")
            )


@pytest.mark.parametrize(
    "labels", [np.array([b"ill", b"well"]), [b"ill", b"well"], np.array([b"ill", "well"], object)]
)
def test_byte_strings_are_no_classes(labels):
    with pytest.raises(
        DataError,
        match=r"training targets hold byte strings: decode them, as in \[one\.decode\(\) for",
    ):
        DataSet.from_arrays((np.zeros((2, 2)), labels), (np.zeros((2, 2)), labels))


def test_options_that_no_set_has_are_one_sentence():
    with pytest.raises(ConfigError, match=r"load takes a folder as data_dir=\.\.\."):
        load("image-folder", dir="/tmp")
    with pytest.raises(ConfigError, match=r"'digits' has no option 'size'; its options: pixels"):
        load("digits", size=3)


class TestTargetsBelowZero:
    """Targets that name no class reach the task, which refuses or uses them."""

    @pytest.mark.parametrize(("y", "classes"), [([-1, -1], None), ([-100, 1], 2), ([-3, -2], None)])
    def test_a_set_of_them_is_a_set(self, y, classes):
        x = np.zeros((2, 1))
        once = DataSet.from_arrays((x, y), (x, y))
        assert once.classes == once.validate().classes == classes

    def test_withheld_labels_are_refused_by_the_task(self):
        x, y = np.zeros((40, 3)), np.full(40, -1)
        with pytest.raises(DataError, match="none is a class, as in sets whose labels are with"):
            simulations.simulate(
                model=torch.nn.Linear(3, 2), data={"train": (x, y), "test": (x, y)}
            )


def test_masked_clients_and_arrays_in_frames_are_refused():
    x, y = np.zeros((4, 1)), [0, 1, 0, 1]
    clients = [np.ma.masked_equal([0, 1], 1), [2, 3]]
    with pytest.raises(DataError, match="clients: 1 values are masked"):
        DataSet.from_arrays((x, y), (x, y), clients=clients)
    rows = [np.ma.masked_equal([1.0, -9999.0], -9999.0), np.ma.masked_equal([1.0, 2.0], 9.0)]
    table = pandas.DataFrame({"a": pandas.Series(rows), "label": [0, 1]})
    with pytest.raises(DataError, match="column 'a' of 'train': 1 values are masked"):
        DataSet.from_mapping({"train": table, "test": table})
