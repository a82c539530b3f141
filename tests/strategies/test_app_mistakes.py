"""Newcomers' mistakes in Flower apps: each ends in one sentence that says what would be right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from mistakes import ends_in_one_sentence
from torch import nn

from clients import PrivateClientApp
from strategies import OneNodePerClient, PrivateFedAvg


def strategy(*model: Any, **given: Any) -> Callable[[], Any]:
    budget = {"epsilon": 8, "delta": 1e-3, "clients": 3, "rounds": 2, "ledger": "new.sqlite"}
    return lambda: PrivateFedAvg(*(model or (nn.Linear(5, 2),)), **budget | given)


MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "nodes by number": (
        strategy(nodes=5),
        "nodes must be a strategies.OneNodePerClient(...), got 5",
    ),
    "no time to wait": (
        lambda: OneNodePerClient(wait=float("nan")),
        "OneNodePerClient: wait must be finite and positive, got nan",
    ),
    "a quorum in percent": (
        lambda: OneNodePerClient(quorum=80),
        "OneNodePerClient: quorum must lie in (0, 1], got 80",
    ),
    "a number of failures below zero": (
        lambda: OneNodePerClient(max_failures=-1),
        "OneNodePerClient: max_failures must be a whole number of at least 0, got -1",
    ),
    "the bound as an argument": (
        strategy(bound=0.5),
        "mechanism=fedlgm.mechanisms.get('uniform', bound=0.5)",
    ),
    "no ledger": (strategy(ledger=None), "ledger must be a path"),
    "a ledger with a name too long": (
        strategy(ledger="a" * 5000),
        "cannot be used: its name is too long; choose a shorter one",
    ),
    "Flower's fraction": (strategy(fraction_train=0.1), "rate is the probability"),
    "several of Flower's arguments": (
        strategy(fraction_train=0.1, min_train_nodes=2),
        "takes part in a round; nor 'min_train_nodes': clients is",
    ),
    "epsilon in a string": (strategy(epsilon="8"), "must be finite and positive, got '8'"),
    "no delta": (strategy(delta=0), "delta must lie in (0, 1), got 0"),
    "a list of clients": (strategy(clients=[1]), "must be a whole number of at least 1, got [1]"),
    "unknown trust": (strategy(trust="none"), "known: central, local"),
    "a folder as the ledger": (strategy(ledger="."), "check that its folder exists"),
    "a mechanism of examples": (
        strategy(mechanism="dp-sgd"),
        "bounds the gradient of each example",
    ),
    "a mechanism with a vote": (
        strategy(nn.Sequential(nn.Linear(5, 3), nn.Linear(3, 2)), mechanism="voted-filling"),
        "use mechanism='water-filling' or 'gaussian'",
    ),
    "the class of a model": (lambda: PrivateClientApp(nn.Linear), "PrivateClientApp(Linear(...))"),
    "a client_fn": (
        lambda: PrivateClientApp(client_fn=print),
        "moves its training loop under @app.train()",
    ),
    "an app without a model": (lambda: PrivateClientApp(), "takes the model, an nn.Module"),
    "an unknown option of an app": (
        lambda: PrivateClientApp(nn.Linear(5, 2), groupby="module"),
        "its options are group_by, consent, mechanism and mods",
    ),
}


@pytest.mark.parametrize(("make", "words"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_ends_in_one_sentence_with_the_remedy(make, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    ends_in_one_sentence(make, words)
