"""The notebooks run from top to bottom."""

from __future__ import annotations

import html
import re
from pathlib import Path

import nbformat
import pytest
from IPython.core.formatters import DisplayFormatter
from nbclient import NotebookClient
from patience import LIMIT_S

import simulations
from simulations.runs.folder import RunFolder

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def outputs_of(name: str, smaller: dict[str, str] | None = None) -> list[str]:
    """What the cells of a notebook put out when they are run in order.

    The texts in `smaller` replace those of the notebook, for runs that are shorter than a reader's.
    """
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    for before, after in (smaller or {}).items():
        cells = [cell for cell in notebook.cells if before in cell.source]
        assert cells, f"{name} has no {before!r}"
        for cell in cells:
            cell.source = cell.source.replace(before, after)
    NotebookClient(
        notebook, timeout=LIMIT_S, resources={"metadata": {"path": str(NOTEBOOKS)}}
    ).execute()
    return [str(o) for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


@pytest.mark.slow
def test_quickstart_notebook() -> None:
    assert any(
        "NOT PRIVATE" in o and "inf" in o
        for o in outputs_of("quickstart.ipynb", {"rounds=20": "rounds=5", "every=20": "every=5"})
    )


@pytest.mark.usefixtures("undrawn")
def test_a_result_in_a_notebook_says_what_protects_and_whether_its_noise_can_be_drawn_again(
    tmp_path,
) -> None:
    """By IPython's own formatter, which makes the output of a cell that ends with a result."""
    small = ["federation.clients=20", "federation.rounds=1", "privacy.accountant=rdp"]
    changes = {
        "sound": [], "unseeded": ["run.seed=none"], "no noise": ["mechanism.name=none"],
        "published": ["mechanism.clip=med", "mechanism.variant=published"],
    }  # fmt: skip
    shown = {}
    for name, change in changes.items():
        result = simulations.simulate(overrides=[*small, *change], run_dir=tmp_path / name)
        shown[name] = html.unescape(DisplayFormatter().format(result)[0]["text/html"])
    for name, page in shown.items():
        assert RunFolder.open(tmp_path / name).result()["guarantee"] in page
    caveat = "the seed is public, and with it the noise can be drawn again"
    assert {name for name, page in shown.items() if caveat in page} == {
        "sound",
        "no noise",
        "published",
    }
    assert {name for name, page in shown.items() if "NOT PRIVATE: " in page} == {
        "no noise",
        "published",
    }


@pytest.mark.slow
def test_attacks_notebook() -> None:
    smaller = {  # of what only has to run
        "[8, 100, 1e3, 1e4, 1e5]": "[8, 1e5]",
        "federation.rounds=40": "federation.rounds=8",
        "federation.rounds=20": "federation.rounds=4",
    }
    outputs = outputs_of("attacks.ipynb", smaller)
    assert sum("image/png" in o for o in outputs) == 4
    figures = dict(
        re.findall(
            r"(no noise|ladp, published|epsilon \d+) .*?mean SSIM +(-?[\d.]+)", "".join(outputs)
        )
    )
    assert float(figures["no noise"]) > 0.9  # the attack works where there is no noise,
    assert abs(float(figures["epsilon 8"])) < 0.3  # and finds nothing under noise that is sound
    assert abs(float(figures["epsilon 1"])) < 0.3


@pytest.mark.slow
def test_example_level_notebook() -> None:
    smaller = {f"{key}=80": f"{key}=8" for key in ("rounds", "evaluate_every", "checkpoint_every")}
    text = "".join(outputs_of("example_level.ipynb", smaller))
    errors = re.findall(r"(true|random) labels +(fc\d): error ([\d.]+)", text)
    assert len(errors) == 6
    assert float(errors[-1][2]) < 0.4  # the last layer of a model that memorised noise
    assert re.search(r"published +accuracy [\d.]+ +epsilon claimed 4.00, proven inf", text)
    assert re.search(r"sound +: one example moves the sum by 0.99.*as reported", text)
    assert re.search(r"published: one example moves the sum by 10.06.*NOT AS REPORTED", text)


@pytest.mark.slow
def test_correlated_notebook() -> None:
    outputs = outputs_of("correlated.ipynb")
    assert sum("image/png" in o for o in outputs) == 2
    text = "".join(outputs).replace("\\n", "\n")
    assert float(re.search(r"ten rounds apart: ([\d.]+)", text)[1]) < 0.4
    found = re.findall(r"([\w ]+, \w+) noise +accuracy (\d+)%", text)
    accuracy = {label: int(percent) for label, percent in found}
    assert accuracy["public cycle, correlated"] > accuracy["public cycle, independent"] + 15
    assert accuracy["public cycle, correlated"] > accuracy["Poisson sampling, independent"] - 8


@pytest.mark.slow
def test_study_notebook() -> None:
    smaller = {'"seeds": 3': '"seeds": 2', '"federation.rounds": 15': '"federation.rounds": 4'}
    text = "".join(outputs_of("study.ipynb", smaller)).replace("\\n", "\n")
    assert "12 of 12 runs" in text
    assert "IProgress" not in text
    assert "toprule" in text
    assert "p_holm" in text
    assert "published together, 12 runs cost epsilon" in text


@pytest.mark.parametrize("name", ["quickstart", "example_level", "correlated", "attacks", "study"])
def test_a_notebook_is_committed_with_small_outputs(name: str) -> None:
    path = NOTEBOOKS / f"{name}.ipynb"
    assert path.stat().st_size < 500_000
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        text = str(cell.get("outputs", ""))
        assert cell.cell_type != "code" or cell.execution_count is not None, (
            "execute the notebook and save it"
        )
        assert not any(
            word in text for word in ("IProgress", "/home/", "/root/", "Traceback", "/work/")
        )
