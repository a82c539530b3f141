"""The names that others call stay where they are."""

from __future__ import annotations

import importlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import fedlgm.allocation
import fedlgm.layers
import fedlgm.mechanisms
import fedlgm.privacy
from fedlgm.mechanisms import ladp
from tests.support.forked import run_afresh


def test_public_names() -> None:
    sigma = fedlgm.allocation.allocate("snr-consistent", [1, 2, 3], [4, 100, 2500], 1.0)
    np.testing.assert_allclose(sigma**2, [31, 24.8, 11.16])
    assert fedlgm.privacy.gaussian_mu(1, 1e-6) == pytest.approx(0.23670438, abs=1e-8)
    mu = fedlgm.privacy.gaussian_mu(1, 1e-6)
    np.testing.assert_allclose(
        fedlgm.mechanisms.gaussian_inid([3, 2, 1], 1, 1e-6) ** 2 * mu**2, [18, 12, 6]
    )
    np.testing.assert_allclose(
        fedlgm.mechanisms.laplace_inid([3, 2, 1], 1), [6.731678, 5.880662, 4.667485], atol=1e-6
    )
    assert fedlgm.mechanisms.get("uniform", bound=0.5).name in fedlgm.mechanisms.names()
    assert ladp.kl_score(torch.tensor([1.0, 2, 3]), torch.tensor([1.0, 1, 1])) == pytest.approx(
        0.266216707, abs=1e-6
    )
    assert ladp.theorem3_constant(0.2, 0.02) == pytest.approx(1.427659, abs=1e-6)
    assert len(fedlgm.layers.LayerTable.from_module(torch.nn.Linear(3, 2))) > 0


@pytest.mark.parametrize(
    "package", ["fedlgm", "clients", "strategies", "simulations", "fedlgm_lab.audits"]
)
def test_editors_complete_public_names(package: str) -> None:
    module = importlib.import_module(package)
    shown = {name for name in dir(module) if not name.startswith("_")}
    assert set(module.__all__) <= shown
    assert not shown & {"importlib", "annotations", "Any", "TYPE_CHECKING"}


@pytest.mark.slow
def test_every_package_of_the_library_is_one_of_its_names() -> None:
    """`import fedlgm` is enough for `fedlgm.example_level.clipped_sum(...)`."""
    packages = {path.parent.name for path in Path(fedlgm.__file__).parent.glob("*/__init__.py")}
    assert packages <= set(dir(fedlgm))
    code = f"import fedlgm; [getattr(fedlgm, name).__doc__ for name in {sorted(packages)}]"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_former_names_give_the_same_modules() -> None:
    """Short public names stay; the others say where the module is now.

    A module of a former package is not loaded twice: a second copy of a class is not the one that
    the library knows."""
    code = """
import importlib, pkgutil, sys, warnings
from fedlgm import moved
for former, name in moved._MOVED.items():
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = importlib.import_module(former)
    assert module is sys.modules[name] and module.__spec__.name == module.__name__ == name, former
    said = [str(one.message) for one in caught if one.category is DeprecationWarning]
    told = [one for one in said if one == f"{former} is now {name}"]
    assert len(told) == (".".join(former.split(".")[:2]) not in moved.SHORT), (former, said)
warnings.simplefilter("ignore")
for former, name in moved._MOVED.items():
    for inside in pkgutil.iter_modules(getattr(importlib.import_module(name), "__path__", ())):
        if f"{former}.{inside.name}" in moved._MOVED or inside.name.startswith("triton"):
            continue
        module = importlib.import_module(f"{former}.{inside.name}")
        assert module is sys.modules[f"{name}.{inside.name}"], (former, inside.name)
"""
    assert run_afresh(code) == (0, "")
    done = subprocess.run(
        [sys.executable, "-m", "clients.node.executor", "--help"], capture_output=True, text=True
    )
    assert done.returncode == 0
    assert "usage" in done.stdout
