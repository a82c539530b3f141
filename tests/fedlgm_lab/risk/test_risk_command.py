"""`fedlgm risk`: figures, files, what it can see, and one message for bad input."""

from __future__ import annotations

import inspect
import json
import sys
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch

from fedlgm import data
from fedlgm.errors import ConfigError
from fedlgm_lab.risk import measure as measuring
from fedlgm_lab.risk.measure import measure, public_examples, resize, risk_of
from simulations import cli
from simulations.config import recipe as recipes
from simulations.config.named_sections import Data

RECIPE = """
extends = "dp-sgd-digits"
[federation]
rounds = 2
[model]
hidden = [8]
[risk]
epochs = 3
adversary_epochs = 3
examples = 200
[mechanism]
name = "lm-dp-sgd"
"""


@pytest.fixture
def run(monkeypatch, capsys, tmp_path):
    """`fedlgm ...` in this process and an empty folder: status, standard output, standard error."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)
    Path("lm.toml").write_text(RECIPE)

    def call(*arguments: object) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["fedlgm", *map(str, arguments)])
        with pytest.raises(SystemExit) as end:
            cli.main()
        out, err = capsys.readouterr()
        return int(end.value.code or 0), out, err

    return call


def test_figures_and_files(run):
    status, out, err = run("risk", "lm.toml", "--emphasis", 2, "--json")
    assert (status, err) == (0, "")
    found = json.loads(out)
    assert all(0 <= layer["gradient_error"] <= 0.5 for layer in found["layers"])
    assert [layer["layer"] for layer in found["layers"]] == ["fc1", "fc2"]
    assert all(0 <= rate <= 0.5 for rate in found["error_rates"])
    assert found["error_rates"] == [layer["training_error"] for layer in found["layers"]]
    assert found["examples"] == 200
    assert "test examples of digits" in found["public"]
    assert sum(weight**2 for weight in found["weights"]) == pytest.approx(1)
    assert sum(weight**2 for weight in found["bias_weights"]) == pytest.approx(1)
    folder = Path("runs/risk-lm")
    assert (folder / "risk.png").read_bytes().startswith(b"\x89PNG")
    assert json.loads((folder / "risk.json").read_text()) == found
    written = recipes.load(folder / "recipe.toml")
    assert written.mechanism.options["error_rates"] == found["error_rates"]
    assert written.mechanism.options["emphasis"] == 2
    status, out, _ = run("simulate", folder / "recipe.toml", "--engine", "local", "--json")
    assert status == 0
    assert json.loads(out)["guarantee_status"] == "proven"


def test_the_table_and_another_public_set(run):
    private = ("--set", "data.name=digits/private")
    status, out, _ = run(
        "risk", "lm.toml", *private, "--public", "digits/public", "--out", "elsewhere"
    )
    assert status == 0
    assert "coin toss" in out
    assert "digits/public" in out
    assert Path("elsewhere/recipe.toml").is_file()
    status, out, _ = run(
        "risk", "dp-sgd-digits", "--set", "risk.epochs=1", "--out", "plain", "--json"
    )
    assert status == 0
    assert not Path("plain/recipe.toml").exists()  # its mechanism takes no error rates


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("lm.toml", "--emphasis", 0.5), "emphasis must be finite and at least 1, got 0.5"),
        (
            ("lm.toml", "--set", "mechanism.emphasis=0.5"),
            "emphasis must be finite and at least 1, got 0.5",
        ),
        (
            ("lm.toml", "--set", "mechanism.error_rates=[0.6,0.1]"),
            "error rates must lie in [0, 0.5]",
        ),
        (
            ("lm.toml", "--set", "risk.examples=39"),
            "layer risk needs at least 40 public examples, got 39",
        ),
        (("lm.toml", "--set", "risk.epochs=0"), "risk.epochs"),
        (("lm.toml", "--public", "nowhere"), "unknown data set 'nowhere'"),
        (("lm.toml", "--public", "bible"), "risk.data"),
        (("lm.toml", "--errors", "best"), "known: training, held-out"),
        (("lm.toml", "--public", "digits"), "'digits' holds examples that the recipe trains on"),
        (
            ("lm.toml", "--public", "digits/public"),
            "holds examples that the recipe trains on ([data] is 'digits')",
        ),
        (("nothing",), "no recipe 'nothing'"),
    ],
)
def test_bad_input_ends_with_one_message(run, arguments, message, monkeypatch):
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")
    status, out, err = run("risk", *arguments)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("error:") == 1
    assert not list(Path().glob("runs/*"))


def test_the_recipe_of_a_run_is_not_replaced(run):
    Path("finished").mkdir()
    Path("finished/recipe.toml").write_text("the run's")
    status, _, err = run("risk", "lm.toml", "--out", "finished")
    assert (status, "finished is not a folder of layer risks" in err) == (2, True)
    assert [file.read_text() for file in Path("finished").iterdir()] == ["the run's"]


def test_only_public_examples_can_enter():
    assert list(inspect.signature(measure).parameters) == [
        "model", "task", "public", "settings", "shape", "clip", "seed", "progress"
    ]  # fmt: skip


def test_private_examples_change_nothing(tmp_path, monkeypatch):
    """Two sets that share their test examples alone have the same layer risk, bit for bit."""
    (tmp_path / "own_sets.py").write_text(
        "import numpy as np\n"
        "def make(seed):\n"
        "    r, p = np.random.default_rng(seed), np.random.default_rng(0)\n"
        "    train = r.normal(size=(90, 6)).astype('float32'), r.integers(0, 3, 90)\n"
        "    test = p.normal(size=(80, 6)).astype('float32'), np.arange(80) % 3\n"
        "    return {'train': train, 'test': test, 'classes': 3}\n"
        "def one():\n    return make(1)\n"
        "def other():\n    return make(2)\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    found = []
    for name in ("one", "other"):
        changes = [
            f"data.name=own_sets:{name}",
            "risk.epochs=2",
            "risk.adversary_epochs=2",
            "model.hidden=[5]",
        ]
        found.append(risk_of(recipes.load("dp-sgd-digits", changes), seed=3))
    assert found[0].risks == found[1].risks
    assert found[0].examples == 80


def test_the_public_half_shares_nothing_with_the_private_one():
    whole, halves = (
        data.load("digits"),
        [data.load(f"digits/{half}") for half in ("private", "public")],
    )
    assert sum(len(half.train_y) for half in halves) == len(whole.train_y)
    rows = [{row.tobytes() for row in half.train_x} for half in halves]
    assert rows[0] | rows[1] == {row.tobytes() for row in whole.train_x}
    assert len(rows[0] & rows[1]) <= len(whole.train_y) - len(
        {row.tobytes() for row in whole.train_x}
    )
    assert np.array_equal(halves[0].test_x, whole.test_x)
    recipe = recipes.load("dp-sgd-digits", ["data.name=digits/private"])
    assert "digits/public" in public_examples(recipe).source
    assert data.outline("fashion-mnist/private").classes == 10


@pytest.mark.parametrize(
    ("own", "public", "refused"),
    [
        ("digits", "digits", True),
        ("digits", "digits/public", True),
        ("digits", "digits/private", True),
        ("digits/private", "digits", True),
        ("digits/private", "digits/private", True),
        ("digits/private", "digits/public", False),
        ("digits/private", "synthetic-100", False),
        ("digits", "fashion-mnist", False),
        ("image-folder", "image-folder", True),
        ("package.module:name", "package.module:name", True),
        ("package.module:name", "package.module:other", False),
    ],
)
def test_a_public_set_shares_no_example_with_the_private_one(own, public, refused):
    section = measuring.RiskSection(data=public)
    if not refused:
        measuring._refuse_private(section, Data(name=own))
        return
    with pytest.raises(ConfigError, match="holds examples that the recipe trains on"):
        measuring._refuse_private(section, Data(name=own))


def test_folders_of_images_are_told_apart_by_their_place(tmp_path):
    own = Data(name="image-folder", dir=str(tmp_path / "celeba"))
    measuring._refuse_private(
        measuring.RiskSection(data="image-folder", dir=str(tmp_path / "ffhq")), own
    )
    with pytest.raises(ConfigError, match="private"):
        measuring._refuse_private(
            measuring.RiskSection(data="image-folder", dir=f"{tmp_path}/x/../celeba"), own
        )


def test_images_of_another_shape_are_resized():
    x = torch.rand(4, 1, 8, 8)
    assert resize(x, (1, 8, 8)) is x
    wide = resize(x, (3, 16, 16))
    assert wide.shape == (4, 3, 16, 16)
    assert torch.equal(wide[:, 0], wide[:, 2])
    assert resize(wide, (1, 16, 16)).shape == (4, 1, 16, 16)
    colours = resize(
        torch.tensor([1.0, 0.0, -1.0])[None, :, None, None].expand(2, 3, 8, 8), (3, 16, 16)
    )
    assert colours[0, :, 3, 5].tolist() == pytest.approx([1.0, 0.0, -1.0])
    with pytest.raises(ConfigError, match="shape"):
        resize(torch.rand(4, 7), (1, 8, 8))


def test_another_public_set_has_the_pixels_of_the_recipe():
    changes = ["data.name=digits/private", "data.pixels=[0, 1]", "risk.data=digits/public"]
    found = measuring.public_examples(recipes.load("dp-sgd-digits", changes))
    assert (float(found.x.min()), float(found.x.max())) == (0.0, 1.0)


def test_data_passed_in_python_need_a_public_set():
    recipe = recipes.load("dp-sgd-digits", ["data.name='<Own>'"])
    with pytest.raises(ConfigError, match=r"risk.data: name the public set"):
        public_examples(recipe)
    assert measuring.RiskSection().data is None
