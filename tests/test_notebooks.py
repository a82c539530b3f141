"""The notebooks run from top to bottom."""

from __future__ import annotations

import re
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient

NOTEBOOKS = Path(__file__).parents[1] / "notebooks"


def outputs_of(name: str) -> list[str]:
    """What the cells of a notebook put out when they are run in order."""
    notebook = nbformat.read(NOTEBOOKS / name, as_version=4)
    NotebookClient(notebook, timeout=240, resources={"metadata": {"path": str(NOTEBOOKS)}}).execute()
    return [str(o) for cell in notebook.cells if cell.cell_type == "code" for o in cell.outputs]


def test_quickstart_notebook() -> None:
    assert any("NOT PRIVATE" in o and "inf" in o for o in outputs_of("quickstart.ipynb"))


@pytest.mark.slow
def test_attacks_notebook() -> None:
    outputs = outputs_of("attacks.ipynb")
    assert sum("image/png" in o for o in outputs) == 4
    figures = dict(re.findall(r"(no noise|ladp, published|epsilon \d+) .*?mean SSIM +(-?[\d.]+)", "".join(outputs)))
    assert float(figures["no noise"]) > 0.9  # the attack works where there is no noise,
    assert abs(float(figures["epsilon 8"])) < 0.3  # and finds nothing under noise that is sound
    assert abs(float(figures["epsilon 1"])) < 0.3


def test_correlated_notebook() -> None:
    outputs = outputs_of("correlated.ipynb")
    assert sum("image/png" in o for o in outputs) == 2
    text = "".join(outputs).replace("\\n", "\n")
    assert float(re.search(r"ten rounds apart: ([\d.]+)", text)[1]) < 0.4
    found = re.findall(r"([\w ]+, \w+) noise +accuracy (\d+)%", text)
    accuracy = {label: int(percent) for label, percent in found}
    assert accuracy["public cycle, correlated"] > accuracy["public cycle, independent"] + 15
    assert accuracy["public cycle, correlated"] > accuracy["Poisson sampling, independent"] - 8
