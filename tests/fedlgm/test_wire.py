"""Arrays inside messages: what Flower's own code writes and reads, with fewer copies."""

from __future__ import annotations

import numpy as np
import pytest
from flwr.app import Array
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from fedlgm import wire
from fedlgm.errors import RunError

ANY = arrays.arrays(
    st.sampled_from([np.float32, np.float64, np.int64, np.bool_]),
    arrays.array_shapes(min_dims=0, min_side=0),
)


@given(ANY)
def test_fields_are_those_of_flowers_array(values):
    assert Array(**wire.fields(values)) == Array(values)


@given(ANY, st.sampled_from(["C", "F"]))
def test_numbers_are_read_as_flower_reads_them(values, order):
    array = Array(np.asarray(values, order=order))
    np.testing.assert_array_equal(wire.view(array.data), array.numpy(), strict=True)


def test_slices_are_written_as_they_are():
    values = np.arange(12.0).reshape(3, 4)[:, ::2]
    np.testing.assert_array_equal(Array(**wire.fields(values)).numpy(), values, strict=True)


def test_a_view_is_no_copy_and_cannot_be_written():
    data = Array(np.arange(5.0)).data
    assert np.shares_memory(wire.view(data), np.frombuffer(data, np.uint8))
    with pytest.raises(ValueError, match="read-only"):
        wire.view(data)[0] = 1


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"no array",
        Array(np.ones(3)).data[:-1],
        Array(np.ones(3)).data[:20],
        Array(np.ones(3)).data + b"12345678",
    ],
)
def test_broken_arrays_are_refused(data):
    with pytest.raises(RunError, match="cannot be read"):
        wire.view(data)


def test_objects_are_never_unpickled(tmp_path):
    np.save(tmp_path / "objects.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(RunError, match="cannot be read"):
        wire.view((tmp_path / "objects.npy").read_bytes())
