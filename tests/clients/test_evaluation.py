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
from fedlgm.training import evaluate
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


def test_a_client_evaluates_only_if_it_was_built_to() -> None:
    assembly = Assembly(recipes.load("digits", ["federation.clients=20", "privacy.accountant='rdp'"]))
    with pytest.raises(PrivacyError, match="does not evaluate"):
        _ask(assembly.client(KeyRing(1), AnyClient()), assembly, [0])
    training = assembly.recipe.training.local
    source = PartitionedSource(assembly.dataset, assembly.partition)
    work = LocalWork(assembly.trainer(False, False), training, source, evaluator=assembly.module())
    client = LayerwiseClient(work, assembly.mechanism, assembly.layers, KeyRing(1), AnyClient())
    members = [3, 5, 7]
    index = np.concatenate([assembly.partition[c] for c in members])
    x, y = (torch.from_numpy(a[index]) for a in (assembly.dataset.train_x, assembly.dataset.train_y))
    loss, accuracy = evaluate(assembly.module(), x, y)
    figures = _ask(client, assembly, members)
    assert figures[wire.EXAMPLE_COUNT] == len(index)
    assert figures["accuracy"] == pytest.approx(accuracy)
    assert figures["loss"] == pytest.approx(loss, rel=1e-5)
