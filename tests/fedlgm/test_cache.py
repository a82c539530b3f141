"""Files of earlier runs save time and decide nothing: not how much noise is added, and not who
holds what."""

from __future__ import annotations

import functools
import hashlib
import math
import stat
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from fedlgm import cache as remembered
from fedlgm.data import partition
from fedlgm.data.partition import _SCHEMES
from fedlgm.privacy import accounting

BUDGET = {"epsilon": 2.0, "delta": 1e-5, "steps": 10, "sampling_rate": 0.1, "accountant": "rdp"}


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FEDLGM_CACHE", str(tmp_path / "computed"))
    return tmp_path / "computed"


def calibrated() -> float:
    accounting._calibrate.cache_clear()
    return accounting.calibrate(**BUDGET)  # type: ignore[arg-type]


def write(file: Path, content: bytes) -> None:
    """As somebody would who knows the format."""
    file.write_bytes(hashlib.sha256(content).hexdigest().encode() + b"\n" + content)


def test_a_kept_calibration_is_the_computed_one(
    kept: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = calibrated()
    (file,) = (kept / "calibration").iterdir()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(kept.joinpath("calibration").stat().st_mode) == 0o700
    monkeypatch.setattr(accounting, "_root", None)  # nothing is searched for
    assert calibrated() == first
    with pytest.raises(TypeError):
        accounting.calibrate(**BUDGET | {"steps": 11})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "edit",
    [
        lambda root: (root - 1e-6).hex(),  # a budget overspent by a millionth
        lambda root: (root - 1.0).hex(),
        lambda root: (root + 0.01).hex(),  # more noise than the budget asks for
        lambda root: float("-inf").hex(),
        lambda root: float("nan").hex(),
        lambda root: (1e300).hex(),
        lambda root: "no number",
        lambda root: "",
    ],
)
def test_an_edited_calibration_changes_nothing(kept: Path, edit: Callable[[float], str]) -> None:
    first = calibrated()
    (file,) = (kept / "calibration").iterdir()
    original = file.read_bytes()
    write(file, edit(math.log(first)).encode())
    assert calibrated() == first
    assert file.read_bytes() == original  # it was computed again


@pytest.mark.parametrize(
    "damage", [b"", b"\n", b"no digest", b"x" * 64 + b"\n0x1p+0", b"\xff\xfe\n\x00"]
)
def test_damage_counts_as_nothing_kept(kept: Path, damage: bytes) -> None:
    first = calibrated()
    (file,) = (kept / "calibration").iterdir()
    file.write_bytes(damage)
    assert calibrated() == first


def test_a_folder_that_cannot_be_written_is_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = calibrated()
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("FEDLGM_CACHE", str(tmp_path / "file" / "below"))
    assert calibrated() == first
    monkeypatch.setenv("FEDLGM_CACHE", "0")
    assert remembered.folder() is None
    monkeypatch.setenv("FEDLGM_CACHE", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert remembered.folder() == tmp_path / ".cache" / "fedlgm" / "computed"


def test_a_budget_that_hardly_asks_for_noise_is_computed_every_time(kept: Path) -> None:
    """The least noise leaves budget unspent, which no file may claim."""
    first = accounting.calibrate(1e4, 1e-5, steps=1, sampling_rate=0.5, accountant="rdp")
    accounting._calibrate.cache_clear()
    assert accounting.calibrate(1e4, 1e-5, steps=1, sampling_rate=0.5, accountant="rdp") == first


def test_old_files_make_place(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remembered, "_MOST", 3)
    for number in range(5):
        remembered.save("an example", {"number": number}, b"%d" % number)
    assert len(list((kept / "an example").iterdir())) == 3
    assert remembered.load("an example", {"number": 4}) == b"4"
    assert remembered.load("an example", {"number": 0}) is None


@pytest.mark.parametrize(("scheme", "values"), [("dirichlet", {"alpha": 0.3}), ("iid", {})])
def test_a_kept_division_is_the_computed_one(
    kept: Path, monkeypatch: pytest.MonkeyPatch, scheme: str, values: dict[str, float]
) -> None:
    labels = np.arange(90) % 5
    first = partition(labels, 7, scheme, seed=3, **values)
    other = partition(labels, 7, scheme, seed=4, **values)
    assert other.order.tolist() != first.order.tolist()

    @functools.wraps(_SCHEMES.find(scheme))
    def never(*arguments: object, **options: object) -> np.ndarray:
        raise AssertionError("divided again")

    monkeypatch.setitem(_SCHEMES._items, scheme, never)
    again = partition(labels, 7, scheme, seed=3, **values)
    assert (again.order.tolist(), again.offsets.tolist()) == (
        first.order.tolist(),
        first.offsets.tolist(),
    )
    assert (again.order.dtype, again.offsets.dtype) == (first.order.dtype, first.offsets.dtype)
    with pytest.raises(AssertionError, match="divided again"):
        partition(labels[::-1], 7, scheme, seed=3, **values)  # other data


@pytest.mark.parametrize(
    "owners",
    [
        np.full(90, 7, np.int32),
        np.full(90, -2, np.int32),
        np.zeros(89, np.int32),
        np.zeros(0, np.int32),
    ],
)
def test_what_is_no_division_is_computed_again(kept: Path, owners: np.ndarray) -> None:
    labels = np.arange(90) % 5
    first = partition(labels, 7, "iid", seed=3)
    (file,) = (kept / "division").iterdir()
    write(file, owners.tobytes())
    assert partition(labels, 7, "iid", seed=3).order.tolist() == first.order.tolist()


def test_the_version_is_that_of_the_imported_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A nightly build earlier on the path was recorded with the version of the older release."""
    for folder, name, version in (
        ("first", "somewhere-nightly", "2.0.dev1"),
        ("second", "somewhere", "1.0"),
    ):
        (tmp_path / folder / "somewhere").mkdir(parents=True)
        (tmp_path / folder / "somewhere" / "__init__.py").touch()
        facts = tmp_path / folder / f"{name.replace('-', '_')}-{version}.dist-info"
        facts.mkdir()
        (facts / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
        )
        monkeypatch.syspath_prepend(tmp_path / folder)
    version_of = remembered.version_of.__wrapped__  # without its memory
    assert version_of("somewhere") == "1.0"
    monkeypatch.syspath_prepend(tmp_path / "first")
    assert version_of("somewhere") == "2.0.dev1"
