"""Sums of honest clients, and whatever a broken or malicious one may send in their place."""

from __future__ import annotations

import math
import struct
from io import BytesIO

import numpy as np
import torch
from flwr.app import Array, Message, RecordDict
from hostile import CLIENTS, NodeGrid, reply_with

from fedlgm.planning.facts import RunFacts, Sampling
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.guarantee import Guarantee
from strategies import OneNodePerClient

ALL = Sampling("poisson", CLIENTS, 1.0)
SIZES = {"a": 3, "b": 2}


def spread(client: int) -> torch.Tensor:
    return torch.randn(5, generator=torch.Generator().manual_seed(client)) * 10.0 ** (
        client % 3 - 1
    )


def nodes(**options):
    return OneNodePerClient(wait=0.2, simulated=True, **options)


def npy(header: bytes, body: bytes = b"") -> Array:
    """An array whose .npy header says whatever one likes."""
    data = b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body
    return Array("float64", (5,), "numpy.ndarray", data)


def saved(values: np.ndarray) -> Array:
    """An array as NumPy itself writes it, Fortran order and structured types included."""
    file = BytesIO()
    np.save(file, values)
    return Array(str(values.dtype), values.shape, "numpy.ndarray", file.getvalue())


HUGE = np.full(5, 1e7)
BROKEN: dict[str, Array] = {
    "norm 1e7": Array(HUGE),
    "one part too long": Array(np.array([0, 0, 0, 1e3, 0.0])),
    "NaN": Array(np.array([0, math.nan, 0, 0, 0.0])),
    "infinite": Array(np.array([0, 0, 0, 0, -math.inf])),
    "squares overflow": Array(np.full(5, 1e200)),
    "largest numbers": Array(np.full(5, np.finfo(np.float64).max)),
    "float32 infinity": Array(np.full(5, np.inf, dtype=np.float32)),
    "too long": Array(np.zeros(6)),
    "too short": Array(np.zeros(4)),
    "empty": Array(np.zeros(0)),
    "two dimensions": Array(np.zeros((1, 5))),
    "integers": Array(np.zeros(5, dtype=np.int64)),
    "half precision": Array(np.zeros(5, dtype=np.float16)),
    "complex": Array(np.zeros(5, dtype=np.complex128)),
    "booleans": Array(np.zeros(5, dtype=bool)),
    "text": Array(np.array(["a"] * 5)),
    "other byte order": saved(np.zeros(5, dtype=">f8")),
    "structured": saved(np.zeros(5, dtype=[("x", "<f8")])),
    "Fortran order": saved(np.asfortranarray(np.zeros((5, 1)))),
    "objects": npy(b"{'descr': '|O', 'fortran_order': False, 'shape': (5,), }\n", b"x" * 40),
    "dates": npy(b"{'descr': '<M8[s]', 'fortran_order': False, 'shape': (5,), }\n", b"x" * 40),
    "void of size 0": npy(b"{'descr': '|V0', 'fortran_order': False, 'shape': (5,), }\n"),
    "shape of another size": npy(
        b"{'descr': '<f8', 'fortran_order': False, 'shape': (9999999999,), }\n", bytes(40)
    ),
    "header is code": npy(b"__import__('os').abort()\n", bytes(40)),
    "header is deep": npy(b"[" * 9000 + b"\n", bytes(40)),
    "no header": Array("float64", (5,), "numpy.ndarray", b"nothing of the kind"),
    "nothing at all": Array("float64", (5,), "numpy.ndarray", b""),
    "cut short": Array("float64", (5,), "numpy.ndarray", Array(np.ones(5)).data[:-1]),
}


def plan_of(trust: str, family: str = "gaussian", sigma: float = 3.0) -> ReleasePlan:
    layers = LayerTable.from_sizes(SIZES)
    facts = RunFacts(1.0, ALL, "add-remove" if trust == "central" else "replace-one", trust)
    guarantee = Guarantee("proven", "a test")
    return ReleasePlan(layers, [2.0, 0.5], [sigma, sigma / 2], facts, guarantee, family=family)


def fake(values) -> Message:
    message = NodeGrid(None).create_message(RecordDict(), "train", 2, "1")
    return reply_with(message, np.asarray(values, dtype=np.float64))
