"""The Python of the how-to pages runs as it is printed, block after block."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

PAGES = Path(__file__).parents[2] / "docs" / "how-to"
BLOCK = re.compile(r"^```(python|toml)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("page", ["own-model", "own-data", "own-task", "text", "adaptive-allocation"])
def test_the_pages_code_runs(page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    blocks = BLOCK.findall((PAGES / f"{page}.md").read_text(encoding="utf-8"))
    assert blocks
    namespace: dict[str, object] = {"__name__": "page"}
    for kind, code in blocks:
        if kind == "toml":
            tomllib.loads(code)
        elif not code.startswith("--8<--"):  # an example that stands in a file of its own
            exec(compile(code, f"{page}.md", "exec"), namespace)
