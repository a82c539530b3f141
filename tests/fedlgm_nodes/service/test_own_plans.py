"""A node whose client plans its layers from its own answer (`client-ladp`)."""

from __future__ import annotations

from pathlib import Path

import torch

from fedlgm import mechanisms
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.transcript import Transcript
from fedlgm.training import models
from fedlgm_nodes.protocol import frames
from tests.support import nodes
from tests.support.nodes import ask, edit, make_node, numbers, plan, rows, served


def test_only_the_layers_that_its_answer_selects_leave_it(tmp_path: Path) -> None:
    folder = make_node(tmp_path / "node")
    edit(folder, 'mechanisms = ["', 'mechanisms = ["client-ladp", "')
    module = models.build("mlp", in_shape=nodes.SHAPE, classes=nodes.CLASSES, hidden=[4])
    mechanism = mechanisms.get("client-ladp", keep=0.5)
    layers = mechanism.table(LayerTable.from_module(module))
    model = layers.flatten(module)
    common = mechanism.plan(layers, plan().facts, Transcript.start(model))
    work = nodes.WORK | {
        "model": {"name": "mlp", "hidden": [4]},
        "mechanism": {"name": "client-ladp", "keep": 0.5},
    }
    with served(folder):
        header, body = ask(folder, text=common.to_json(), work=work, body=frames.npy(model.numpy()))
        assert header["ok"], header
    total = torch.from_numpy(numbers(body))
    own = mechanism.plan_from_answer(common, total[layers.size :].double().numpy())
    sent = [bool(layer.any()) for layer in layers.split(total[: layers.size])]
    assert sent == own.released.tolist()
    assert sum(sent) == 1
    assert len(rows(folder)) == 1
