"""The wheel by itself, and the licences of what it depends on."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedlgm", "clients", "strategies", "simulations")


def closure(extras: tuple[str, ...]) -> dict[str, metadata.Distribution]:
    """Installed distributions that the project needs with these extras, and all that those need."""
    found: dict[str, metadata.Distribution] = {}
    waiting: list[tuple[str, tuple[str, ...]]] = [("fedlgm", extras)]
    seen: set[tuple[str, tuple[str, ...]]] = set()
    while waiting:
        name, wanted = waiting.pop()
        if (name, wanted) in seen:
            continue
        seen.add((name, wanted))
        try:
            distribution = metadata.distribution(name)
        except metadata.PackageNotFoundError:
            continue  # of another platform, or an extra that is not installed here
        found[name] = distribution
        for text in distribution.requires or ():
            needed = Requirement(text)
            if needed.marker is None or any(needed.marker.evaluate({"extra": extra}) for extra in ("", *wanted)):
                waiting.append((needed.name.lower().replace("_", "-"), tuple(sorted(needed.extras))))
    return found


def licences(distribution: metadata.Distribution) -> list[str]:
    """What a distribution's metadata say of its licence: an expression, classifiers, or a short text."""
    told = distribution.metadata
    classifiers = [line.rpartition("::")[2].strip() for line in told.get_all("Classifier", []) if "License ::" in line]
    text = (told.get("License") or "").strip()
    said = [told.get("License-Expression") or "", *classifiers, text.splitlines()[0] if text else ""]
    return [one for one in said if one and one not in ("OSI Approved", "UNKNOWN")]


def only_gpl(said: list[str]) -> bool:
    """Whether every licence that is offered is the GPL or the AGPL (not the LGPL, which lets others link)."""
    offered = [part for one in said for part in re.split(r"\bOR\b|;|/", one) if part.strip()]
    strict = re.compile(r"(?<!L)(?<!Lesser )(?<!Library )\b(A?GPL|GNU (Affero )?General Public)", re.IGNORECASE)
    return bool(offered) and all(strict.search(part) and "exception" not in part.lower() for part in offered)


@pytest.mark.parametrize(
    ("said", "strict"),
    [
        (["GPL-3.0-or-later"], True),
        (["GNU Affero General Public License v3"], True),
        (["GPL-2.0 OR MIT"], False),
        (["LGPL-3.0-only"], False),
        (["GNU Lesser General Public License v3 (LGPLv3)"], False),
        (["Apache-2.0"], False),
        ([], False),
    ],
)
def test_what_counts_as_the_gpl_alone(said, strict):
    assert only_gpl(said) is strict


def test_no_dependency_is_under_the_gpl_alone():
    found = closure(("ray", "tensorboard", "onnx", "huggingface", "mlflow", "wandb"))
    assert len(found) > 50
    assert {name: licences(one) for name, one in found.items() if only_gpl(licences(one))} == {}
    own = found.pop("fedlgm")
    assert own.metadata["License-Expression"] == "Apache-2.0"
    assert sum(bool(licences(one)) for one in found.values()) > 0.9 * len(found)


@pytest.mark.slow
def test_the_wheel_alone_simulates_in_a_fresh_environment(tmp_path):
    """The wheel is built from the sources and installed without them, with this environment's dependencies.

    Other versions of Python would need other dependencies: they only compile its files, and the output names them.
    """
    source = tmp_path / "source"
    source.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    build = [*pip, "wheel", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path), str(source)]
    done = subprocess.run(build, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("fedlgm-*.whl")
    top = {name.partition("/")[0] for name in zipfile.ZipFile(wheel).namelist()}
    assert {one for one in top if not one.endswith(".dist-info")} == set(PACKAGES)

    fresh = tmp_path / "fresh"
    venv.create(fresh, with_pip=False)
    site = Path(sysconfig.get_path("purelib", "venv", {"base": str(fresh), "platbase": str(fresh)}))
    done = subprocess.run(
        [*pip, "install", "--no-deps", "--target", str(site), str(wheel)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    # A path in a .pth file adds its packages, but not the editable installs that its own .pth files name.
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = fresh / "bin" / "python"
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("PYTHON", "VIRTUAL_ENV"))}

    def run(*command: str) -> str:
        done = subprocess.run([python, *command], cwd=fresh, env=clean, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stderr
        return done.stdout

    where = run("-c", f"import {', '.join(PACKAGES)}; print({', '.join(f'{name}.__file__' for name in PACKAGES)})")
    assert all(Path(path).is_relative_to(site) for path in where.split())
    entry = ("-c", "import sys; from simulations.entry import main; sys.exit(main())")
    command = (*entry, "simulate", "digits", "--engine", "local", "--run-dir", "run", "--json")
    result = json.loads(run(*command, "--set", "federation.rounds=2", "--set", "privacy.accountant=rdp"))
    assert 0 < result["epsilon"] <= 8
    assert len(result["model_sha256"]) == 64
    assert metadata.version("fedlgm") in run(*entry, "--version")
    for other in ("3.11", "3.12", "3.13"):
        if other == f"{sys.version_info.major}.{sys.version_info.minor}":
            continue
        find = [sys.executable, "-m", "uv", "python", "find", "--no-python-downloads", "--system", other]
        found = subprocess.run(find, capture_output=True, text=True, cwd=tmp_path, env=clean)
        if found.returncode != 0:
            print(f"Python {other}: not tried, no interpreter of that version answers here")
            continue
        compiled = [found.stdout.strip(), "-m", "compileall", "-q", *(str(site / name) for name in PACKAGES)]
        done = subprocess.run(compiled, capture_output=True, text=True, env=clean)
        assert done.returncode == 0, done.stdout
        print(f"Python {other}: compiles; not run, the dependencies are not installed for it here")
