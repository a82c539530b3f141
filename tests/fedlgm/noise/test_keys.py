"""Named streams: never shared, never dependent on anything but their name."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedlgm.errors import ConfigError
from fedlgm.noise.keys import KeyRing, Purpose, mt19937_state


@pytest.mark.slow
def test_forty_thousand_torch_streams_all_differ():
    """`Generator.manual_seed` keeps 32 bits of a seed: that many streams would collide with
    probability 0.17."""
    ring = KeyRing(7)
    first = set()
    for round_ in range(100):
        for layer in range(400):
            stream = ring.torch_generator(Purpose.NOISE, round_, 0, layer)
            first.add(tuple(torch.randint(0, 2**62, (2,), generator=stream).tolist()))
    assert len(first) == 40_000


def test_manual_seed_would_not_do():
    first = [torch.Generator().manual_seed(seed) for seed in (5, 5 + 2**32)]
    a, b = (torch.randint(0, 2**62, (4,), generator=generator) for generator in first)
    assert torch.equal(a, b)


@given(
    st.integers(0, 2**128 - 1),
    st.lists(st.integers(0, 2**32 - 1), max_size=5),
    st.sampled_from([1, 3, 8, 624]),
)
def test_words_are_those_of_numpy(root, path, count):
    ring = KeyRing(root)
    theirs = np.random.SeedSequence(root, spawn_key=(Purpose.NOISE, *path)).generate_state(
        count, np.uint32
    )
    np.testing.assert_array_equal(ring.words(count, Purpose.NOISE, *path), theirs, strict=True)


def test_state_layout_against_numpy():
    words = KeyRing(1).words(624, Purpose.NOISE, 3)
    generator = torch.Generator()
    generator.set_state(mt19937_state(words))
    theirs = np.random.RandomState()
    theirs.set_state(("MT19937", words, 624))
    expected = theirs.randint(0, 2**32, size=2000, dtype=np.uint32) & 0x7FFFFFFF
    found = torch.empty(2000, dtype=torch.int32).random_(generator=generator)
    assert found.tolist() == expected.tolist()


names = st.tuples(
    st.integers(0, 2**128 - 1),
    st.sampled_from(Purpose),
    st.lists(st.integers(0, 2**32 - 1), max_size=4),
)


@given(names, names)
def test_streams_are_functions_of_their_names(one, other):
    def words(name):
        root, purpose, path = name
        return KeyRing(root).words(8, purpose, *path).tolist()

    assert words(one) == words(one)
    # Trailing zeros are part of a path: nothing is padded away.
    assert (words(one) == words(other)) == (one == other)
    root, purpose, path = one
    assert words(one) != words((root, purpose, [*path, 0]))


def test_derived_rings_depend_on_every_fact_and_on_the_secret():
    rings = [
        KeyRing(1),
        KeyRing(1).derive(),
        KeyRing(1).derive(b"ab"),
        KeyRing(1).derive(b"a", b"b"),
        KeyRing(1).derive(b"b", b"a"),
        KeyRing(2).derive(b"ab"),
    ]
    assert len(set(rings)) == len(rings)
    assert KeyRing(1).derive(b"ab") == rings[2]


def test_every_kind_of_generator_is_reproducible():
    ring = KeyRing.from_seed(5)
    assert (
        ring.numpy_generator(Purpose.TRAIN, 1).random()
        == ring.numpy_generator(Purpose.TRAIN, 1).random()
    )
    assert torch.equal(
        torch.rand(3, generator=ring.torch_generator(Purpose.TRAIN, 1)),
        torch.rand(3, generator=ring.torch_generator(Purpose.TRAIN, 1)),
    )


def test_without_a_seed_keys_come_from_the_operating_system():
    roots = {KeyRing.from_seed(None).root for _ in range(100)}
    assert len(roots) == 100
    assert max(roots).bit_length() > 120


def test_seed_zero_is_a_seed():
    assert KeyRing.from_seed(0).root == 0


def test_drawing_leaves_the_global_generators_alone():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    KeyRing(1).torch_generator(Purpose.NOISE, 1).get_state()
    torch.randn(10, generator=KeyRing(1).torch_generator(Purpose.NOISE, 1))
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("seed", [-1, 2**128])
def test_seeds_out_of_range(seed):
    with pytest.raises(ConfigError, match="seed"):
        KeyRing.from_seed(seed)


@pytest.mark.parametrize("step", [-1, 2**32])
def test_path_entries_out_of_range(step):
    with pytest.raises(ValueError, match="path"):
        KeyRing(0).words(1, Purpose.NOISE, step)


def test_a_secret_root_is_not_in_what_objects_print():
    """Notebooks, logs and tracebacks show values: the root and the releases give the sums."""
    ring = KeyRing.from_seed(None)
    for text in (repr(ring), str(ring), f"{[ring]}", repr(ring.derive(b"noise"))):
        assert str(ring.root) not in text
        assert str(ring.derive(b"noise").root) not in text
        assert "<secret>" in text
    assert repr(KeyRing(7)) == "KeyRing(root=7)"
