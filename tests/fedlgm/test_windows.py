"""Windows is refused in one sentence, instead of by the name of a missing module."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fedlgm.package_conflicts import refuse_windows


def test_windows_is_refused_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    refuse_windows()
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(ImportError, match="use WSL"):
        refuse_windows()


def test_importing_simulations_says_so_before_anything_else() -> None:
    code = "import sys; sys.platform = 'win32'; import simulations"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith("ImportError: fedlgm's simulations and ledgers")


@pytest.mark.parametrize(
    "code",
    ["from fedlgm import Ledger", "import fedlgm.privacy.ledger"],
)
def test_ledgers_say_so(code: str) -> None:
    code = f"import sys; sys.platform = 'win32'; {code}"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "use WSL" in done.stderr.splitlines()[-1]
