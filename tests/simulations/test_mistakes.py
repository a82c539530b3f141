"""What newcomers write, from Python: each mistake ends in one sentence that says what would be
right.

Mistakes at the command line are in `test_cli_refusals.py`, wrong values of a recipe in
`config/test_messages.py`, and those in a Flower app in `strategies/test_app_mistakes.py`.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import torch
from mistakes import ends_in_one_sentence
from scipy import sparse
from torch import nn
from torch.optim import SGD
from torch.utils.data import TensorDataset

import fedlgm
import simulations
from fedlgm import mechanisms, privacy
from fedlgm.errors import ConfigError, FedlgmError
from fedlgm_lab import audits
from simulations.config.recipe import BUNDLED, load

X = np.random.default_rng(0).standard_normal((200, 5)).astype(np.float32)


Y = (X[:, 0] > 0).astype(int)


TABLE = pd.DataFrame(X, columns=list("abcde")).assign(y=Y)


TEXTS = pd.DataFrame({"text": ["a b"] * 200, "y": Y})


LATE = np.where(np.arange(600).reshape(200, 3) == 500, 99, 7)


OWNED = {"train": (X, Y), "test": (X, Y)}


SMALL = {
    "federation.clients": 10,
    "federation.rounds": 1,
    "federation.rate": 0.5,
    "privacy.delta": 0.01,
    "privacy.accountant": "rdp",
}


def run(**given: Any) -> Callable[[], Any]:
    """A simulation of a small model on small data, with one thing wrong."""
    return lambda: simulations.simulate(
        **{
            "model": nn.Linear(5, 2),
            "data": {"train": (X, Y), "test": (X, Y)},
            "overrides": SMALL,
            "engine": "local",
        }
        | given
    )


def changed(**values: Any) -> Callable[[], Any]:
    """The same with other values of the recipe; a double underscore is the dot."""
    return run(overrides=SMALL | {name.replace("__", "."): value for name, value in values.items()})


def on(x: Any, y: Any) -> Callable[[], Any]:
    return run(data={"train": (x, y), "test": (x, y)})


def study(**given: Any) -> Callable[[], Any]:
    return lambda: simulations.study(
        **{
            "model": nn.Linear(5, 2),
            "data": {"train": (X, Y), "test": (X, Y)},
            "seeds": 1,
            "progress": False,
        }
        | given
    )


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    # arguments
    "epsilon as an argument": (run(epsilon=8), "overrides={'privacy.epsilon': 8}"),
    "rounds as an argument": (run(rounds=3), "overrides={'federation.rounds': 3}"),
    "clients as an argument": (run(clients=3), "overrides={'federation.clients': 3}"),
    "num_clients as an argument": (run(num_clients=3), "overrides={'federation.clients': 3}"),
    "the folder of a study": (
        run(folder="x"),
        "simulate has no argument 'folder'; did you mean run_dir?",
    ),
    "a model in the recipe's place": (
        lambda: simulations.simulate(nn.Linear(5, 2)),
        "pass this by name, model=...",
    ),  # type: ignore[arg-type]
    "data in the recipe's place": (
        lambda: simulations.simulate(OWNED),
        "pass this by name, data=...",
    ),  # type: ignore[arg-type]
    "a number as overrides": (run(overrides=3), "strings or a mapping, got int: 3"),
    "a list as noise": (
        lambda: privacy.epsilon([1.0], 1e-5, steps=1),  # type: ignore[arg-type]
        "noise_multiplier must be finite and at least 0, got [1.0]",
    ),
    "a number as the mechanism": (lambda: mechanisms.get(3), "unknown mechanism 3"),  # type: ignore[arg-type]
    "no workers": (study(workers=None), "workers must be a whole number of at least 1, got None"),
    "a number as the folder of a study": (
        study(folder=3),
        "folder must be a path, such as 'runs/first', got 3",
    ),
    "a file as the folder of a study": (study(folder=__file__), "cannot make the folder"),
    "a mistyped section": (run(overrides={"federated.clients": 3}), "did you mean 'federation'?"),
    "learning rate as an argument": (run(lr=0.1), "overrides={'training.lr': 0.1}"),
    "models of a study": (
        study(models=[nn.Linear(5, 2)]),
        "a study varies it in its grid: grid={'model': [...]}",
    ),
    "mechanisms of a study": (
        study(mechanism=["uniform"]),
        "varies it in its grid: grid={'mechanism': [...]}",
    ),
    "a list as the model of a study": (
        study(model=[nn.Linear(5, 2)], overrides=SMALL),
        "use a study with grid={'model': [...]}",
    ),
    "two models of one class": (
        study(model=None, grid={"model": [nn.Linear(5, 2), nn.Linear(5, 2)]}),
        "two models have the label 'Linear': label one of them, as in ('second', model)",
    ),
    "a list of seeds": (
        study(seeds=[1, 2]),
        "the number of repetitions (their seeds follow from run.seed)",
    ),
    "a folder as the model": (
        run(model=str(Path(__file__).parent)),
        "pass the module that from_pretrained makes",
    ),
    "a name of the Hub as the model": (
        run(model="prajjwal1/bert-tiny"),
        "a name of the Hugging Face Hub: pass the",
    ),
    "a folder as the data": (
        run(data=str(Path(__file__).parent)),
        "is a folder: for images set data.name =",
    ),
    "a pair as the data": (
        run(data=(X, Y)),
        "a pair (x, y) or a torch data set is only one of the two parts",
    ),
    "a mechanism as the method of an audit": (
        lambda: audits.Subject("mine", mechanisms.get("uniform")),  # type: ignore[arg-type]
        "method must be a fedlgm.mechanisms.method.Method, which Subject.of makes",
    ),
    "seed as an argument": (run(seed=1), "overrides={'run.seed': 1}"),
    "epsilon of a study": (
        study(epsilon=8),
        "study has no argument 'epsilon'; a recipe has the key privacy.epsilon",
    ),
    "epsilon of an advice": (
        lambda: simulations.recommend(epsilon=8),
        "recommend has no argument 'epsilon'",
    ),
    "progress as a truth value": (run(progress=True), "progress must be a function"),
    "unknown engine": (run(engine="rays"), "did you mean 'ray'?"),
    "a device as the engine": (run(engine="cuda"), "known: local, ray, flower"),
    "unknown recipe": (lambda: simulations.simulate("digit"), "did you mean 'digits'?"),
    "no such file": (lambda: simulations.simulate("/nowhere/x.toml"), "neither a file nor bundled"),
    "a script as the recipe": (
        lambda: simulations.simulate("train.py"),
        "neither a file nor bundled",
    ),
    "no such run": (lambda: simulations.resume("nowhere"), "not a run folder"),
    # overrides
    "a key with an underscore": (run(overrides=["data_dir=x"]), "did you mean 'data.dir'?"),
    "a key without a section": (run(overrides={"epsilon": 8}), "did you mean 'privacy.epsilon'?"),
    "no value": (run(overrides=["privacy.epsilon"]), "take section.key=value"),
    "a nested mapping": (
        run(overrides={"privacy": {"epsilon": 8}}),
        "without nesting: {'privacy.epsilon': 8}",
    ),
    "a mistyped key": (changed(privacy__epsilonn=3), "did you mean 'epsilon'?"),
    "epsilon in words": (changed(privacy__epsilon="eight"), "must be a number, got 'eight'"),
    "a rate in percent": (changed(federation__rate=50), "must be at most 1, got 50"),
    "rate and cohort": (changed(federation__cohort=3), "exactly one of rate"),
    "more clients than examples": (changed(federation__clients=500), "at most one per sample"),
    "weights by counts": (
        changed(federation__weighting="num-examples"),
        "use equal weights, 'uniform'",
    ),
    "Flower's name of an optimizer": (
        changed(federation__server_optimizer="fedadam"),
        "'momentum', 'adam', 'yogi'",
    ),
    "another optimizer": (changed(training__optimizer="rmsprop"), "must be 'sgd' or 'adam'"),
    "another accountant": (changed(privacy__accountant="moments"), "must be 'pld' or 'rdp'"),
    "the unit of a user": (
        changed(privacy__unit="user"),
        "needs federation.users: the user of each client",
    ),
    "a client mechanism for examples": (changed(privacy__unit="example"), "or use one of dp-sgd"),
    "local trust without a cap": (
        changed(privacy__trust="local"),
        "privacy.max_participations is needed",
    ),
    "correlated noise without a schedule": (
        changed(privacy__noise="banded"),
        "set federation.sampling to 'cyclic'",
    ),
    "a file of weights that is not there": (
        changed(model__weights="base.safetensors"),
        "weights: there is no file",
    ),
    # data
    "labels as objects": (on(X, Y.astype(object)), "astype(int) for classes"),
    "labels from 1": (on(X, Y + 1), "targets that begin at 0: y - 1"),
    "labels of -1 and 1": (
        on(X, 2 * Y - 1),
        "np.unique(y, return_inverse=True)[1] numbers the classes",
    ),
    "labels in a column": (on(X, Y[:, None]), "one column of classes is y.ravel()"),
    "one-hot labels": (on(X, np.eye(2, dtype=int)[Y]), "one-hot rows are y.argmax(1)"),
    "labels as floats": (on(X, Y + 0.0), "y.astype(int)"),
    "three arrays in a part": (
        run(data={"train": (X, Y, Y), "test": (X, Y)}),
        "got a tuple of 3: give (x, y)",
    ),
    "inputs alone": (
        run(data={"train": X, "test": X}),
        "a pair of arrays (inputs, targets), got a ndarray",
    ),
    "a frame with a column of text": (
        on(pd.DataFrame(X).assign(sex="m"), Y),
        "column 'sex' of 'training' holds text, not numbers: drop it",
    ),
    "a frame with dates": (
        on(pd.DataFrame(X).assign(day=pd.date_range("2020", periods=200)), Y),
        "'day' of 'training' holds dates",
    ),
    "a table with times": (
        run(
            data={
                "train": (t := TABLE.assign(a=pd.to_timedelta(range(200)))),
                "test": t,
                "target": "y",
            }
        ),
        "column 'a' of 'train' holds dates or times, not numbers: give days since a public date",
    ),
    "frames with columns in another order": (
        run(data={"train": (TABLE[list("abcde")], Y), "test": (TABLE[list("edcba")], Y)}),
        (
            "test inputs: the columns e, d, c, b, a are not those of the training inputs in their "
            "order (a, b, c, d, e)"
        ),
    ),
    "names as the targets of a regression": (
        run(
            task="regression",
            overrides=SMALL | {"data.partition": "iid"},
            model=nn.Linear(5, 1),
            data={"train": (X, np.where(Y, "a", "b")), "test": (X, np.where(Y, "a", "b"))},
        ),
        (
            "needs numbers as targets, but those of 'own' are names of classes (a, b): use the "
            "task 'classification'"
        ),
    ),
    "a batch in another precision": (
        lambda: fedlgm.training.example_level.clipped_sum(
            nn.Linear(5, 2),
            torch.tensor(X[:8]).double(),
            torch.tensor(Y[:8]),
            clip=1.0,
            layers=fedlgm.LayerTable.from_module(nn.Linear(5, 2)),
        ),
        "RuntimeError: mat1 and mat2 must have the same dtype",
    ),
    "a token that the model does not know, in a late row": (
        run(
            model=nn.Sequential(nn.Embedding(50, 4), nn.Flatten(), nn.Linear(12, 2)),
            data={"train": (LATE, Y), "test": (LATE % 50, Y)},
        ),
        (
            "the model does not take the training tokens of 'own', 7 to 99: IndexError: index out "
            "of range in self"
        ),
    ),
    "missing values": (
        on(np.where(X > 2, np.nan, X), Y),
        "values are NaN or infinite, the first at index",
    ),
    "a sparse matrix": (on(sparse.csr_matrix(X), Y), "x.toarray()"),
    "no test set": (run(data={"train": (X, Y)}), "key 'test' is missing"),
    "a mistyped part": (run(data={"train": (X, Y), "tets": (X, Y)}), "unknown key 'tets'"),
    "two arrays": (run(data=(X, Y)), "{'train': (x, y), 'test': (x, y)}"),
    "other columns in the test set": (
        run(data={"train": (X, Y), "test": (X[:, :4], Y)}),
        "are not like the training set's",
    ),
    "a file of a table": (run(data="patients.csv"), "pandas.read_csv(...)"),
    "a set of the hub": (run(data="imdb"), "unknown data set 'imdb'"),
    "one table": (run(data=TABLE), "pass {'train': table, 'test': table}"),
    "a table without a target": (
        run(data={"train": TABLE, "test": TABLE}),
        "which column is the target?",
    ),
    "no such column of users": (
        run(data={"train": TABLE, "test": TABLE, "target": "y"}, users="u"),
        "known: a",
    ),
    "a column of users in arrays": (run(users="who"), "give the user of each training example"),
    "fewer users than clients": (
        run(data={"train": (X, Y), "test": (X, Y), "users": np.arange(200) % 3}),
        "10 clients exceed the 3 users",
    ),
    "text without a tokenizer": (
        run(
            data={
                "train": TABLE.assign(text="a b"),
                "test": TABLE.assign(text="a b"),
                "target": "y",
            }
        ),
        "text needs a tokenizer",
    ),
    "an example of two clients": (
        run(data={"train": (X, Y), "test": (X, Y), "clients": [[0, 1], [1, 2]]}),
        "name each sample once, for one client",
    ),
    # models, tasks, mechanisms, metrics
    "a model of other inputs": (run(model=nn.Linear(4, 2)), "does not take a batch of the data"),
    "one output for two classes": (run(model=nn.Linear(5, 1)), "is the task 'binary'"),
    "a file as the model": (run(model="model.pt"), "pass the nn.Module"),
    "a mistyped model": (run(model="resnet-18"), "did you mean 'resnet18'"),
    "the weights as the model": (run(model=nn.Linear(5, 2).state_dict()), "neither an nn.Module"),
    "a frozen model": (run(model=nn.Linear(5, 2).requires_grad_(False)), "no trainable parameters"),
    "double precision": (run(model=nn.Linear(5, 2).double()), "model.float() converts them"),
    "a softmax at the end": (
        run(model=nn.Sequential(nn.Linear(5, 2), nn.Softmax(1))),
        "remove its last softmax",
    ),
    "a sigmoid at the end": (
        run(model=nn.Sequential(nn.Linear(5, 1), nn.Sigmoid(), nn.Flatten(0)), task="binary"),
        "remove its last sigmoid",
    ),
    "a normalisation over the batch": (
        run(
            model=nn.Sequential(
                nn.Linear(5, 4), nn.BatchNorm1d(4, track_running_stats=False), nn.Linear(4, 2)
            )
        ),
        (
            "the model fails in training mode on one example, as the last batch of a client: "
            "ValueError: Expected more"
        ),
    ),
    "a call without gradients": (torch.no_grad()(run()), "or is this called under torch.no_grad()"),
    "a compiled model": (
        lambda: run(model=torch.compile(nn.Linear(5, 2)))(),
        "compiled (OptimizedModule): pass the nn.Module",
    ),
    "a scripted model": (
        lambda: run(model=torch.jit.script(nn.Linear(5, 2)))(),
        "pass the nn.Module from which it was made",
    ),
    "a model without its data": (
        run(data=None),
        "the data 'digits' of the recipe were used: pass your own as data=",
    ),
    "a model of two outputs": (
        run(model=nn.GRU(5, 2)),
        "wrap it in a module that returns the tensor",
    ),
    "BatchNorm": (
        run(model=nn.Sequential(nn.Linear(5, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))),
        "to_groupnorm replaces them",
    ),
    "a torch loss": (run(task=nn.CrossEntropyLoss()), "reduction='none'"),
    "a mistyped mechanism": (run(mechanism="unifrom"), "did you mean 'uniform'?"),
    "a metric by name": (
        run(metrics="auc"),
        "metrics takes functions, such as {'auc': lambda outputs, targets",
    ),
    "evaluate by name": (run(evaluate="auc"), "evaluate takes functions"),
    "an optimizer of torch": (
        run(server_optimizer=SGD),
        "is a torch optimizer, which steps on gradients: use 'sgd'",
    ),
    "a set of torch": (
        run(data=TensorDataset()),
        "or a torch data set is only one of the two parts",
    ),
    "a part of torch": (
        run(data={"train": TensorDataset(), "test": TensorDataset()}),
        "the torch data set TensorDataset: IndexError",
    ),
    "owners that nobody named": (
        changed(data__partition="natural"),
        "name the owner of each example (users=)",
    ),
    "a search of nothing": (
        lambda: simulations.tune(),
        "search: give at least one key and its values",
    ),
    "no patience": (changed(run__patience=0), "run.patience: must be at least 1"),
    "a mistyped schedule": (
        run(trainer="scheduled", overrides=SMALL | {"trainer.schedule": "cos"}),
        "known: linear",
    ),
    "a mistyped precision": (run(trainer="float16"), "unknown trainer 'float16'"),
    "a metric without a function": (
        run(metrics={"auc": 3}),
        "must be a function (outputs, targets) -> number",
    ),
    "a metric for each example": (
        run(metrics={"a": lambda o, t: o}),
        "must return one number for the whole test set",
    ),
    "an unknown option": (lambda: mechanisms.get("uniform", bounds=3), "did you mean 'bound'?"),
    "epsilon 0": (
        lambda: privacy.calibrate(0, 1e-5, steps=3),
        "epsilon must be finite and positive, got 0",
    ),
    "an unknown rule": (
        lambda: fedlgm.planning.allocation.allocate("equal", [1.0], [1], 1.0),
        "known: uniform",
    ),
    # wrong types, and arguments that were forgotten
    "users as lists": (
        run(users=[[1, 2], [3]]),
        "lists of the examples of each client are data['clients']",
    ),
    "two targets": (
        run(data={"train": TABLE, "test": TABLE, "target": ["y", "a"]}),
        "needs one target, but the training targets have 2 columns: name one column",
    ),
    "missing texts": (
        run(
            data={
                "train": TEXTS.assign(text=None),
                "test": TEXTS,
                "text": "text",
                "tokenizer": len,
                "target": "y",
            }
        ),
        "has no text in 200 of 200 rows, first in row 0",
    ),
    "a length in a string": (
        run(
            data={
                "train": TEXTS,
                "test": TEXTS,
                "text": "text",
                "tokenizer": len,
                "target": "y",
                "length": "8",
            }
        ),
        "a whole number of at least 1, got '8'",
    ),
    "pixels as tokens": (on((X > 0).astype(int), Y), "other inputs are floats, such as x / 255"),
    "a series as the target": (
        run(data={"train": TABLE, "test": TABLE, "target": TABLE["y"]}),
        "must be named by one string, got Series",
    ),
    "a mistyped column": (
        run(data={"train": TABLE.assign(site="a"), "test": TABLE, "target": "y"}, users="sites"),
        "did you mean 'site'",
    ),
    "files in the place of tables": (
        run(data={"train": "a.csv", "test": "b.csv", "target": "y"}),
        "data.test: there is no file 'b.csv'",
    ),
    "a list of tables": (
        run(data={"train": [TABLE, TABLE], "test": TABLE, "target": "y"}),
        "pandas.concat joins",
    ),
    "an AUC of one class": (
        run(model=nn.Linear(5, 1), task="ranked", data={"train": (X, Y), "test": (X, Y * 0)}),
        "test targets of both classes",
    ),
    "epsilon of a resumed run": (
        lambda: simulations.resume("run", epsilon=8),
        "resume has no argument 'epsilon'",
    ),
    "a tokenizer by name": (
        run(
            data={"train": TEXTS, "test": TEXTS, "target": "y", "text": "text", "tokenizer": "bert"}
        ),
        "AutoTokenizer.from_pretrained(...), got 'bert'",
    ),
    "progress without an argument": (run(progress=lambda: None), "is called with each round's row"),
    "a number as the folder": (
        run(run_dir=3),
        "run_dir must be a path, such as 'runs/first', got 3",
    ),
    "a number as the run": (lambda: simulations.resume(3), "run must be a path"),  # type: ignore[arg-type]
    "a list as the grid": (study(grid=["uniform"]), "grid must map keys to lists"),
    "a list as the search": (
        lambda: simulations.tune(search=["training.lr"]),
        "search must map keys to lists of values",  # type: ignore[arg-type]
    ),
    "delta in a string": (
        lambda: privacy.calibrate(1, "1e-5", steps=3),
        "delta must lie in (0, 1), got '1e-5'",  # type: ignore[arg-type]
    ),
    "names as figures": (lambda: simulations.difference("a", "b"), ("takes numbers, one per seed")),  # type: ignore[arg-type]
    "an example twice": (
        run(data=OWNED | {"clients": [[0, 0, 1], [2]]}),
        "name each sample once, for one client",
    ),
    "an example that is not there": (
        run(data=OWNED | {"clients": [[0, 500], [2]]}),
        "names samples outside [0, 200)",
    ),
    "no client": (run(data=OWNED | {"clients": 10}), "a list of sample numbers for each client"),
    "examples as fractions": (
        run(data=OWNED | {"clients": [[0.5, 1.0], [2]]}),
        "must be a list of sample numbers",
    ),
    "users of other data": (run(users=np.arange(100)), "each of the 200 training examples"),
    "users that are missing": (run(users=np.full(200, np.nan)), "have no user (NaN or empty)"),
    "no test examples": (
        run(data={"train": (X, Y), "test": (X[:0], Y[:0])}),
        "at least one test example",
    ),
    "features in strings": (on(X.astype(str), Y), "must be an array of numbers"),
    "a test table without a column": (
        run(data={"train": TABLE, "test": TABLE.drop(columns="b"), "target": "y"}),
        "'test' has no column 'b'",
    ),
    "dates": (
        run(
            data={"train": TABLE.assign(a=pd.Timestamp("2020-01-01")), "test": TABLE, "target": "y"}
        ),
        "give days",
    ),
    "an optimizer as the model": (
        lambda: run(model=SGD(nn.Linear(5, 2).parameters(), 0.1))(),
        "'SGD' is neither an nn.Module",
    ),
    "layers in a list": (run(model=[nn.Linear(5, 2)]), "'list' is neither an nn.Module"),
    # paths that no file can have, and numbers that no run can have
    "a recipe of too many characters": (lambda: simulations.simulate("a" * 5000), "recipe 'aaa"),
    "a file of nobody's": (
        changed(model__weights="~nobody-here/a"),
        "a': the user's home is not known",
    ),
    "a file with a name too long": (
        changed(model__weights="a" * 5000),
        "cannot be used: its name is too long; choose a shorter one",
    ),
    "a folder with a name too long": (
        run(run_dir="a" * 5000),
        "cannot be used: its name is too long; choose a shorter one",
    ),
    "a folder with a zero byte": (
        run(run_dir="runs/a\0"),
        "run_dir must be a path, such as 'runs/first'",
    ),
    "data with a name too long": (
        lambda: simulations.simulate(overrides={"data.name": "a" * 5000}),
        "cannot be used: its name is too long; choose a shorter one",
    ),
    "more rounds than can be planned": (
        changed(federation__rounds=2**63),
        "rounds: must be at most 1000000",
    ),
    "a rate below every accountant's numbers": (
        changed(federation__rate=1e-320),
        "rate: must be at least 1e-12",
    ),
    "a name that leads out of the folder of runs": (
        changed(name="../../b"),
        "name: must be a name for folders",
    ),
    "a name with a zero byte": (
        changed(name="a\0b"),
        "name: must be a name for folders, without slashes, got",
    ),
    "a name of too many characters": (
        changed(name="a" * 300),
        "name: must have at most 150 characters",
    ),
    "a bound beyond all noise": (
        run(mechanism=mechanisms.get("uniform", bound=1e40)),
        "lie in [2^-100, 2^100], got",
    ),
    "a share below all noise": (
        run(
            model=nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)),
            mechanism=mechanisms.get("voted-filling", share=1e-300),
        ),
        "lie in [2^-100, 2^100], got",
    ),
    "more threads than a machine has": (
        changed(run__threads=100_000),
        "run.threads: must be at most 1024, got",
    ),
    "a separation of any length": (
        changed(privacy__min_separation=10**400),
        "privacy.min_separation: must be at most 1000000000",
    ),
    "a number of thousands of digits": (
        lambda: simulations.simulate(overrides=["federation.rounds=" + "9" * 5000]),
        "must be a whole number, got '999",
    ),
    "lists nested without end": (
        lambda: simulations.simulate(overrides=["run.seed=" + "[" * 3000 + "]" * 3000]),
        "must be a whole number",
    ),
    # studies
    "a grid by a bare key": (study(grid={"epsilon": [1, 2]}), "did you mean 'privacy.epsilon'?"),
    "a grid of one value": (study(grid={"privacy.epsilon": 3}), "must be a list of values, got 3"),
    "no seeds": (study(seeds=0), "at least 1, got 0"),
    "sides of two lengths": (lambda: simulations.difference([1, 2, 3], [1, 2]), "paired by seed"),
}


def test_there_are_many():
    assert len(MISTAKES) >= 60


@pytest.mark.parametrize(("make", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_in_one_sentence_with_the_remedy(make, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ends_in_one_sentence(make, words)


def test_a_file_is_not_exported_into_a_folder_that_is_not_there(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(run_dir="run")()
    for target, words in (
        ("no/m.safetensors", "there is no folder no; create it first"),
        ("m.h5", "must name a format: .safetensors"),
    ):
        with pytest.raises(FedlgmError, match=words):
            result.export(target)
    with pytest.raises(
        FedlgmError, match=r"choose another folder \(--run-dir, run_dir=\), or continue"
    ):
        run(run_dir="run")()


def test_tokens_without_a_label_are_no_classes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    rows = pd.DataFrame({"input_ids": [[1, 2, 3], [4, 5]] * 10, "sentiment": [0, 1] * 10})
    with pytest.raises(
        FedlgmError,
        match=r"the table has no column 'label': name yours, data=\{..., 'target': column\}",
    ):
        run(data={"train": rows, "test": rows}, model=nn.Embedding(9, 2))()


def test_a_finished_run_is_not_opened_with_new_weights(tmp_path):
    run(run_dir=tmp_path / "run", model=nn.Linear(5, 2))()
    with pytest.raises(
        FedlgmError, match=r"another model; pass the same model \(its initial weights are part"
    ):
        simulations.resume(
            tmp_path / "run", model=nn.Linear(5, 2), data={"train": (X, Y), "test": (X, Y)}
        )


def test_a_mechanism_of_ones_own_is_audited_as_an_object():
    subject = audits.Subject.of(mechanisms.get("uniform", bound=0.5))
    assert subject.name == "uniform"
    assert audits.Audit(method="probe").mechanism(subject).passed


def test_a_folder_with_a_bundled_name_hides_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("mlp", "digits"):
        Path(name).mkdir()
    assert run(model="mlp", data=None, run_dir="run")().folder == tmp_path / "run"


@pytest.mark.parametrize(
    ("written", "meant"),
    [
        ("privacy.target_epsilon=3", "'privacy.epsilon'?"),
        ("training.learning_rate=0.1", "'training.lr'?"),
        ("training.local_epochs=2", "'training.epochs'?"),
        ("privacy.max_grad_norm=1", "'mechanism.bound'?"),
        ("training.max_grad_norm=1", "'mechanism.bound'?"),
        ("mechanism.max_grad_norm=1", "'bound'?"),
    ],
)
def test_names_of_other_libraries_lead_to_the_key(written: str, meant: str) -> None:
    with pytest.raises(ConfigError, match="did you mean") as said:
        load("digits", [written])
    assert str(said.value).endswith(f"did you mean {meant}")


def test_adamw_is_adam_with_weight_decay() -> None:
    with pytest.raises(ConfigError, match="AdamW is optimizer = 'adam' with a weight_decay"):
        load("digits", ["training.optimizer=AdamW"])
    assert load("digits", ["training.optimizer=adam", "training.weight_decay=0.1"])


@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16", "utf-16-be"])
def test_a_recipe_of_a_windows_editor_is_read(encoding: str, tmp_path: Path) -> None:
    text = (BUNDLED / "digits.toml").read_text().replace("\n", "\r\n")
    mark = "\ufeff" if encoding == "utf-16-be" else ""
    (tmp_path / "mine.toml").write_bytes((mark + text).encode(encoding))
    assert load(str(tmp_path / "mine.toml")).federation == load("digits").federation


def test_an_argument_too_many_is_no_value_of_an_option(run) -> None:
    status, _, err = run("report", "A", "B")
    assert status == 2
    assert "the command takes only RUN" in " ".join(err.replace("│", " ").split())
