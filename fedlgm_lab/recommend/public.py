"""Public examples for the advice, which the caller gives, a recipe's test set holds, or are
synthetic.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from itertools import product
from typing import Any

import numpy as np
import torch

from fedlgm import data
from fedlgm.data import DataSet
from fedlgm.errors import ConfigError, DataError, Notice
from fedlgm.extension.loader import is_object, is_reference
from fedlgm.training import inputs
from fedlgm.training.tasks import Task
from fedlgm.wording import prefix_key
from simulations.config.named_sections import Data
from simulations.config.recipe import Recipe

SYNTHETIC = 2048
"""Number of synthetic examples, which are used if none are given."""
MOST = 20_000
"""Largest number of examples that are used."""
_HELD_OUT = 4  # one example in four is used for measurements, the other three for training


def public_examples(
    recipe: Recipe, task: Task, public: Any, outline: DataSet | None
) -> tuple[DataSet, str]:
    """Load the public examples, shuffle them and divide them into two parts.

    Args:
        recipe: the recipe.
        task: the recipe's task.
        public: None for synthetic examples; "test" for the recipe's test examples, which every run
            evaluates without protection; the name of a data set, a `DataSet` or a mapping, whose
            training examples are public; or (x, y).
        outline: the set's shapes, classes and test examples if the data are Python objects; its
            training examples are never read.

    Returns:
        Examples that replace the clients' (train) and examples on which losses are measured (test);
        and their origin, in words.

    Raises:
        ConfigError: there are no synthetic examples for the task.
        DataError: there are fewer than 16 examples, or the task does not take the targets.
    """
    section = recipe.data
    if public is None:
        shapes = outline or data.outline(section.name, **section.reading) or _test_part(recipe)
        warnings.warn(
            Notice(
                "no public examples are given: the advice rests on synthetic ones of the same "
                "shape, which show how large the layers' updates are but little about your task; "
                "pass --public (public=...)"
            ),
            stacklevel=3,
        )
        dataset, source = _synthetic(shapes, task), "synthetic examples of the same shape"
    elif isinstance(public, str) and public == "test":
        dataset = outline or _test_part(recipe)
        source = f"test examples of {dataset.name}"
    elif isinstance(public, tuple) and len(public) == 2:
        recipe_outline = outline or (
            data.outline(section.name, **section.reading) if _is_named(recipe) else None
        )
        dataset = DataSet.from_arrays(
            public,
            public,
            classes=None if recipe_outline is None else recipe_outline.classes,
            name="given",
        )
        source = "given examples"
    else:
        directory = section.dir if isinstance(public, str) else None
        known_options = data.reading_options(public) if isinstance(public, str) else ()
        options = {key: value for key, value in section.reading.items() if key in known_options}
        try:
            dataset = data.load(public, directory, **options)
        except (ConfigError, DataError) as error:
            raise type(error)(f"public: {str(error).removeprefix('data: ')}") from error
        source = f"training examples of {dataset.name}"
    return task.prepare(_split(dataset)), source


def outline_of(given: Any) -> tuple[DataSet | None, int | None]:
    """Find shapes, classes, test examples and the number of clients of data that are given as
    objects, without reading training examples.

    Args:
        given: data as for `simulate`; None for the data of a recipe.

    Raises:
        DataError: `given` is neither a data set nor a mapping with 'test'.

    Example:
        >>> private = object()  # never looked at
        >>> found, clients = outline_of({"train": private, "test": (np.zeros((4, 2)), np.arange(4)), "clients": [[0]]})
        >>> found.shape, found.classes, clients
        ((2,), 4, 1)
    """
    if given is None or isinstance(given, str):
        return None, None
    if callable(given) and not isinstance(given, DataSet | Mapping):
        raise DataError(
            "data: this function would also return private examples, so it is not called: pass "
            "{'test': (x, y)}, or leave data out and pass public examples"
        )
    if isinstance(given, DataSet):
        clients = _number(given.clients, given.train_user)
        test = (given.test_x, given.test_y)
        return DataSet.from_arrays(test, test, classes=given.classes, name=given.name), clients
    if not isinstance(given, Mapping) or "test" not in given:
        raise DataError("data: give a fedlgm.data.DataSet or {'train': (x, y), 'test': (x, y)}")
    columns: Any = getattr(given["test"], "column_names", None) or getattr(
        given["test"], "columns", ()
    )
    named = isinstance(given.get("users"), str) and given["users"] in list(columns)
    clients = _number(
        given.get("clients"), None if isinstance(given.get("users"), str) else given.get("users")
    )
    # a column that names the users is not a feature
    owners = ("clients",) if named else ("clients", "users")
    entries = {key: value for key, value in given.items() if key not in owners}
    return DataSet.from_mapping(entries | {"train": given["test"]}), clients


def _number(clients: Any, users: Any) -> int | None:
    """Count the clients, or the users, that data name; None if the recipe states the number."""
    if clients is not None:
        return len(clients)
    return None if users is None else len(np.unique(np.asarray(users)))


def refuse_private(recipe: Recipe, private: Any, public: Any) -> None:
    """Refuse "public" examples that are in fact the private examples.

    Args:
        recipe: the recipe, whose data are private if `private` is None.
        private: data as for `simulate`; the examples are never read.
        public: as for `public_examples`.

    Raises:
        DataError: the public and the private examples are the same set or objects, or parts of the
            same arrays.
    """
    if isinstance(public, str):
        private_name = recipe.data.name
        if data.overlap(public, private_name):
            raise DataError(
                f"public: {public!r} holds training examples of the recipe ([data] is {private_name!r}), "
                "which are private: pass another set, a half that is declared public (such as "
                "digits/public with data.name = 'digits/private'), or test"
            )
        return
    pairs = product(_training(private), _training(public)) if private is not None else ()
    if any(first is second or _share_memory(first, second) for first, second in pairs):
        raise DataError(
            "public: these are the training examples of data, which are private: pass others, or "
            "'test'"
        )


def _training(given: Any) -> list[Any]:
    """List the training inputs and targets, or the table that holds both."""
    if isinstance(given, DataSet):
        given = given.held("train_x"), given.train_y
    elif isinstance(given, Mapping):
        given = given.get("train")
    if given is None:
        return []
    if type(given) in (tuple, list):
        return [array for part in given for array in (part if type(part) is tuple else (part,))]
    return [given]


def _share_memory(first: Any, second: Any) -> bool:
    """Tell whether two arrays or tensors share memory.

    The numbers are not read, so a copy of private numbers is not noticed.
    """
    arrays = [
        each.numpy() if issubclass(type(each), torch.Tensor) else each for each in (first, second)
    ]
    if not all(issubclass(type(array), np.ndarray) for array in arrays):
        return False
    try:
        return np.shares_memory(arrays[0], arrays[1], max_work=1000)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:  # this happens only for arrays with irregular strides
        return False


def examples_of(recipe: Recipe) -> int | None:
    """Find the published number of training examples of a recipe's data set; None if the number is
    known only from private data.
    """
    section = recipe.data
    if not _is_named(recipe):
        return None
    if section.name.startswith("synthetic"):  # generated
        return len(data.load(section.name).train_y)
    return data.published_examples(section.name, section.train_images)


def _is_named(recipe: Recipe) -> bool:
    name = recipe.data.name
    return not name.startswith("<") and ":" not in name


def _test_part(recipe: Recipe) -> DataSet:
    """Load the recipe's test examples, which every run evaluates without protection."""
    section = recipe.data
    with prefix_key("public"):
        return data.only_test_examples(section.name, section.dir, **section.reading)


def of_public(recipe: Recipe) -> Recipe:
    """Remove the name and the folder of the data from a recipe, so that objects that are made from
    the recipe cannot read the data.
    """
    section = recipe.data
    scheme, options = section.partition, section.options
    if scheme == "natural" or is_object(scheme) or is_reference(scheme):
        scheme, options = "iid", {}  # the recipe's own scheme divides the private examples
    replacement = Data(
        name="<public examples>", partition=scheme, partition_seed=section.partition_seed, **options
    )
    return recipe.model_copy(update={"data": replacement})


def _split(dataset: DataSet) -> DataSet:
    """Shuffle a set's training examples, of which every fourth becomes a test example."""
    count = len(dataset.train_y)
    if count < 4 * _HELD_OUT:
        raise DataError(f"public examples: there must be at least {4 * _HELD_OUT}, got {count}")
    order = np.random.default_rng(0).permutation(count)[:MOST]
    test_rows, train_rows = order[::_HELD_OUT], np.delete(order, np.s_[::_HELD_OUT])
    return DataSet(
        dataset.name,
        inputs.take(dataset.train_x, train_rows),
        dataset.train_y[train_rows],
        inputs.take(dataset.train_x, test_rows),
        dataset.train_y[test_rows],
        dataset.classes,
    )


def _synthetic(like: DataSet, task: Task) -> DataSet:
    """Generate learnable examples: noisy class means, or text of a random Markov chain."""
    rng, first = np.random.default_rng(0), inputs.first(like.train_x)
    classes, count = like.classes, SYNTHETIC
    if (
        isinstance(like.train_x, tuple)
        or classes is None
        or task.name not in ("classification", "next-token")
    ):
        raise ConfigError(
            f"there are no synthetic examples for the task {task.name!r} with such data: give "
            "public ones (--public)"
        )
    if task.name == "next-token":
        following = rng.integers(classes, size=(classes, 4))  # four tokens may follow each
        text = np.empty((count, first.shape[1] + 1), dtype=np.int64)
        text[:, 0] = rng.integers(classes, size=count)
        for t in range(1, text.shape[1]):
            text[:, t] = following[text[:, t - 1], rng.integers(4, size=count)]
        return DataSet("synthetic", text[:, :-1], text[:, 1:], text[:0, :-1], text[:0, 1:], classes)
    y = rng.integers(classes, size=count)
    means = rng.standard_normal((classes, *first.shape[1:]))
    x = (0.5 * (means[y] + rng.standard_normal((count, *first.shape[1:])))).astype(np.float32)
    return DataSet("synthetic", x, y, x[:0], y[:0], classes)
