"""Studies' files."""

from __future__ import annotations

from pathlib import Path

import pytest

from fedlgm.errors import ConfigError
from fedlgm_lab.studies import files

TEXT = """
title = "Two networks"
[grid]
mechanism = ["uniform", "gaussian"]
model = ["logistic", {{label = "wide", name = "mlp", options = {{hidden = [8]}}}}]
[[claims]]
says = "Uniform noise costs accuracy"
a = "uniform"
b = "gaussian"
expect = "lower"
at = {{"privacy.epsilon" = 8.0}}
each = "{each}"
[[claims]]
says = "They are the same"
a = "uniform"
b = "gaussian"
expect = "equal"
margin = 0.01
"""


def test_a_claim_is_made_at_each_value_of_a_key(tmp_path: Path) -> None:
    file = tmp_path / "study.toml"
    file.write_text(TEXT.format(each="model"))
    first, second, third = files.load(str(file)).claims
    assert (first.says, second.says) == (
        "Uniform noise costs accuracy at logistic",
        "Uniform noise costs accuracy at wide",
    )
    assert first.at == {"privacy.epsilon": 8.0, "model": "logistic"}
    assert second.at == {"privacy.epsilon": 8.0, "model": "wide"}
    assert second.expect == "lower"
    assert (third.says, third.at) == ("They are the same", {})
    file.write_text(TEXT.format(each="modle"))
    with pytest.raises(ConfigError, match=r"each = 'modle'.*one of \['mechanism', 'model'\]"):
        files.load(str(file))


@pytest.mark.parametrize("text", ["", 'title = "Nothing"', "seeds = 5"])
def test_a_file_that_names_nothing_to_run_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "study.toml"
    path.write_text(text)
    with pytest.raises(ConfigError, match="names nothing to run"):
        files.load(str(path))
