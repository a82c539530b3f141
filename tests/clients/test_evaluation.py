"""Federated evaluation: refused unless asked for, right where it is given."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, RecordDict

from clients import AnyClient, LayerwiseClient, LocalWork, PartitionedSource
from fedlgm import wire
from fedlgm.errors import PrivacyError
from fedlgm.keys import KeyRing
from fedlgm.tasks import evaluate
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.engines.local import LocalGrid
from strategies.layerwise import _record


def _ask(client: LayerwiseClient, assembly: Assembly, members: list[int]) -> dict[str, float]:
    grid = LocalGrid(client.as_app())
    content = RecordDict(
        {wire.ARRAYS: _record(assembly.initial_model()), wire.CONFIG: ConfigRecord({wire.CLIENTS: members})}
    )
    (reply,) = grid.send_and_receive([grid.create_message(content, "evaluate", 2, "1")])
    return dict(reply.content.metric_records[wire.METRICS])  # type: ignore[arg-type]


def _evaluating(assembly: Assembly) -> LayerwiseClient:
    source = PartitionedSource(assembly.dataset, assembly.partition)
    work = LocalWork(
        assembly.trainer(False, False),
        assembly.recipe.training.local,
        source,
        evaluator=assembly.module(),
        task=assembly.task,
    )
    return LayerwiseClient(work, assembly.mechanism, assembly.layers, KeyRing(1), AnyClient())


def test_a_client_evaluates_only_if_it_was_built_to() -> None:
    assembly = Assembly(recipes.load("digits", ["federation.clients=20", "privacy.accountant='rdp'"]))
    with pytest.raises(PrivacyError, match="does not evaluate"):
        _ask(assembly.client(KeyRing(1), AnyClient()), assembly, [0])
    members = [3, 5, 7]
    index = np.concatenate([assembly.partition[c] for c in members])
    x, y = (torch.from_numpy(a[index]) for a in (assembly.dataset.train_x, assembly.dataset.train_y))
    expected = evaluate(assembly.task, assembly.module(), x, y)
    figures = _ask(_evaluating(assembly), assembly, members)
    assert figures == pytest.approx({**expected, wire.EXAMPLE_COUNT: len(index)})


def test_the_figures_are_the_tasks() -> None:
    values = ["federation.clients=20", "privacy.accountant='rdp'", "task.name=regression", "data.partition=iid"]
    assembly = Assembly(recipes.load("digits", values))
    figures = _ask(_evaluating(assembly), assembly, [1])
    assert set(figures) == {"loss", "rmse", "mae", wire.EXAMPLE_COUNT}
    assert figures["loss"] == pytest.approx(figures["rmse"] ** 2)


def test_clients_without_data_have_no_figures() -> None:
    clients = ["federation.clients=3000", "data={name = 'digits', partition = 'dirichlet-large', alpha = 0.5}"]
    assembly = Assembly(recipes.load("digits", [*clients, "privacy.accountant='rdp'"]))
    empty = int(np.flatnonzero(assembly.sizes == 0)[0])
    assert _ask(_evaluating(assembly), assembly, [empty]) == {wire.EXAMPLE_COUNT: 0}
