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
from patience import LIMIT_S

ROOT = Path(__file__).parents[1]
PACKAGES = ("fedlgm", "clients", "strategies", "simulations", "fedlgm_nodes", "fedlgm_lab")


def closure(extras: tuple[str, ...], *names: str) -> dict[str, metadata.Distribution]:
    """Installed distributions that the project needs with these extras, or that `names` need."""
    found: dict[str, metadata.Distribution] = {}
    waiting: list[tuple[str, tuple[str, ...]]] = [(name, extras) for name in names or ("fedlgm",)]
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
            if needed.marker is None or any(
                needed.marker.evaluate({"extra": extra}) for extra in ("", *wanted)
            ):
                waiting.append(
                    (needed.name.lower().replace("_", "-"), tuple(sorted(needed.extras)))
                )
    return found


def licences(distribution: metadata.Distribution) -> list[str]:
    """What a distribution's metadata say of its licence: an expression, classifiers, or a short
    text."""
    told = distribution.metadata
    classifiers = [
        line.rpartition("::")[2].strip()
        for line in told.get_all("Classifier", [])
        if "License ::" in line
    ]
    text = (told.get("License") or "").strip()
    said = [
        told.get("License-Expression") or "",
        *classifiers,
        text.splitlines()[0] if text else "",
    ]
    return [one for one in said if one and one not in ("OSI Approved", "UNKNOWN")]


def only_gpl(said: list[str]) -> bool:
    """Whether every licence that is offered is the GPL or the AGPL (not the LGPL, which lets others
    link)."""
    offered = [part for one in said for part in re.split(r"\bOR\b|;|/", one) if part.strip()]
    strict = re.compile(
        r"(?<!L)(?<!Lesser )(?<!Library )\b(A?GPL|GNU (Affero )?General Public)", re.IGNORECASE
    )
    return bool(offered) and all(
        strict.search(part) and "exception" not in part.lower() for part in offered
    )


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


def interpreter(version: str) -> Path | None:
    """A Python of this version that answers, from the path or from pyenv's folder."""
    name = f"python{version}"
    found = [Path(at) for at in [shutil.which(name)] if at]
    for candidate in [
        *found,
        *sorted((Path.home() / ".pyenv" / "versions").glob(f"{version}.*/bin/{name}")),
    ]:
        asked = [candidate, "-c", "import sys; print(*sys.version_info[:2], sep='.')"]
        if subprocess.run(asked, capture_output=True, text=True).stdout.strip() == version:
            return candidate
    return None


ACCELERATOR = ("nvidia-", "cuda-", "triton")
"""Beginnings of the names of libraries for CUDA. Three gigabytes would be unpacked for nothing."""


def site_of(environment: Path, version: str) -> Path:
    return environment / "lib" / f"python{version}" / "site-packages"


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from the sources."""
    return build_wheel(tmp_path_factory.mktemp("wheel"))


def build_wheel(folder: Path, **variables: str) -> Path:
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-input"]
    build = [
        *pip,
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        str(folder),
        str(source),
    ]
    done = subprocess.run(build, capture_output=True, text=True, env=os.environ | variables)
    assert done.returncode == 0, done.stderr
    (made,) = folder.glob("fedlgm-*.whl")
    top = {name.partition("/")[0] for name in zipfile.ZipFile(made).namelist()}
    assert {one for one in top if not one.endswith(".dist-info")} == set(PACKAGES)
    return made


USED = """
import sys, pathlib
import nbformat, torch
from nbclient import NotebookClient
from sklearn.datasets import load_digits
from fedlgm.privacy.ledger import Ledger
from simulations.engines.flower import follow
from simulations.engines.superlink import private_superlink

cell = nbformat.v4.new_code_cell(pathlib.Path(sys.argv[1]).read_text() + "result")
notebook = nbformat.v4.new_notebook(cells=[cell])
NotebookClient(notebook, timeout=600).execute()
assert any("text/html" in str(output) for output in notebook.cells[0].outputs)

here = pathlib.Path.cwd()
with private_superlink(here / "superlink.log") as flwr:
    asked = ("--federation-config", "num-supernodes=10 client-resources-num-cpus=1", "--run-config", f'folder="{here}"')
    run = flwr.submit(pathlib.Path(sys.argv[2]), *asked)
    assert follow(flwr, run, here / "superlink.log") == "finished:completed", flwr.log(run)
    assert "DEPRECATED" not in flwr.log(run) + (here / "superlink.log").read_text()
model = torch.nn.Linear(64, 10)
model.load_state_dict(torch.load("model.pt"))
x, y = load_digits(return_X_y=True)
accuracy = (model(torch.tensor(x).float() / 16).argmax(1).numpy() == y).mean()
assert accuracy > 0.2, accuracy
with Ledger(here / "ledger.sqlite") as ledger:
    ledger.verify(contiguous=True)
    assert ledger.rounds() == 3
    assert 7 < ledger.epsilon(1e-2) <= 8
print("notebook and flwr run: done")
"""
"""In the fresh environment: a notebook with the first example, and an app under `flwr run`."""


VERSIONS = ("3.11", "3.13")  # the oldest and the newest


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_the_wheel_alone_runs_in_a_fresh_environment(
    version: str, wheel: Path, tmp_path: Path
) -> None:
    """`fedlgm simulate` on each Python that is found; a notebook and `flwr run` on another one than
    that of the tests, which run both.

    The version of the tests takes their dependencies. Others install the same versions of them,
    which needs a package index."""
    own = version == f"{sys.version_info.major}.{sys.version_info.minor}"
    at = Path(sys.executable) if own else interpreter(version)
    if at is None:
        pytest.skip(f"no Python {version} here")
    fresh = tmp_path / "fresh"
    python = fresh / "bin" / "python"
    clean = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("PYTHON", "VIRTUAL_ENV"))
    }
    if own:
        venv.create(fresh, with_pip=False)
        site = site_of(fresh, version)
        install = [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-deps",
            "--target",
            str(site),
            str(wheel),
        ]
        done = subprocess.run(install, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        # A path in a .pth file adds its packages, but not the editable installs that its own .pth
        # files name.
        (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
        for name in ("fedlgm", "flwr"):
            for entry in metadata.distribution(name).entry_points.select(group="console_scripts"):
                script = fresh / "bin" / entry.name
                script.write_text(
                    f"#!{python}\nfrom {entry.module} import {entry.attr}\n{entry.attr}()\n"
                )
                script.chmod(0o755)
    else:
        subprocess.run([at, "-m", "venv", fresh], check=True)
        # Modules are compiled when they are imported, which few of them are.
        pip = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--no-compile",
            "--no-deps",
            "--disable-pip-version-check",
        ]
        pip += ["--retries", "1", "--timeout", "30"]
        names = closure(("ray", "tensorboard")) | closure((), "ipykernel", "nbclient", "nbformat")
        needed = [
            f"{name}=={metadata.version(name)}"
            for name in names
            if name != "fedlgm" and not name.startswith(ACCELERATOR)
        ]
        libraries = Path(sysconfig.get_path("purelib")) / "nvidia"
        if libraries.is_dir():  # what torch is linked with, whatever the Python
            (site_of(fresh, version) / "nvidia").symlink_to(libraries)
        done = subprocess.run([*pip, *needed], env=clean, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(
                f"Python {version}: the index lacks a dependency: "
                f"{done.stderr.strip().splitlines()[-1]}"
            )
        done = subprocess.run([*pip, str(wheel)], env=clean, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr

    clean["PATH"] = os.pathsep.join(
        [str(fresh / "bin"), str(Path(sys.executable).parent), clean["PATH"]]
    )

    def run(*command: str) -> str:
        done = subprocess.run(
            [python, *command],
            cwd=fresh,
            env=clean,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        assert done.returncode == 0, (done.stdout[-2000:], done.stderr[-4000:])
        return done.stdout

    where = run(
        "-c",
        f"import {', '.join(PACKAGES)}; "
        f"print({', '.join(f'{name}.__file__' for name in PACKAGES)})",
    )
    assert all(Path(path).is_relative_to(fresh) for path in where.split())
    entry = ("-c", "import sys; from simulations.entry import main; sys.exit(main())")
    command = (*entry, "simulate", "digits", "--engine", "local", "--run-dir", "run", "--json")
    result = json.loads(
        run(*command, "--set", "federation.rounds=2", "--set", "privacy.accountant=rdp")
    )
    assert 0 < result["epsilon"] <= 8
    assert len(result["model_sha256"]) == 64
    assert metadata.version("fedlgm") in run(*entry, "--version")
    if own and any(interpreter(other) for other in VERSIONS if other != version):
        return
    examples = ROOT / "docs" / "examples"
    done = run("-c", USED, str(examples / "own_model.py"), str(examples / "existing_flower_app"))
    assert done.endswith("notebook and flwr run: done\n")


@pytest.mark.slow
def test_a_wheel_with_kernels_needs_no_compiler(tmp_path: Path) -> None:
    wheel = build_wheel(tmp_path, FEDLGM_PREBUILT="1")
    assert wheel.name.endswith(f"py3-none-{sysconfig.get_platform().replace('-', '_')}.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "site")
    kernels = (tmp_path / "site/fedlgm/training/native/prebuilt").iterdir()
    assert sorted(file.name.split("-")[0] for file in kernels) == ["avx2"] * 2 + ["avx512"] * 2
    asked = [
        sys.executable,
        "-Werror::UserWarning",
        "-c",
        "import fedlgm; from fedlgm.training.native import reason; print(fedlgm.__file__, reason())",
    ]
    without = os.environ | {
        "CXX": "false",
        "FEDLGM_CACHE": str(tmp_path / "cache"),
        "PYTHONPATH": str(tmp_path / "site"),
    }
    told = subprocess.run(asked, capture_output=True, text=True, env=without, cwd=tmp_path).stdout
    assert told == f"{tmp_path}/site/fedlgm/__init__.py None\n"
    assert not list(tmp_path.glob("cache/kernels/*"))
