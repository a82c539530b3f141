"""The report of a run: one file, what it says and to whom, and what a browser makes of it."""

from __future__ import annotations

import html
import json
import re
import shutil
import stat
import subprocess
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pandas
import pytest
import torch
from patience import LIMIT_S

import simulations
from fedlgm.errors import LedgerError, RunError
from fedlgm.privacy.guarantee import WHO_ADDS_NOISE
from fedlgm_lab.reports import figures, page, pictures, report
from fedlgm_lab.reports.notebook import summary_html
from fedlgm_lab.reports.parties import list_parties
from fedlgm_lab.reports.svg import to_uri
from simulations import launch
from simulations.config.recipe import Recipe
from simulations.runs import new_folder
from simulations.runs.folder import RunFolder
from simulations.runs.rows import PrivateRow

_CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)


@pytest.fixture(scope="module")
def adaptive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose bounds change over the rounds, with its reports."""
    from federations import tiny_values

    from simulations.config import recipe as recipes

    values = tiny_values()
    values["mechanism"] |= {"clip": "med", "norms": "quantile"}
    values["federation"] |= {"rounds": 4}
    run = tmp_path_factory.mktemp("report") / "run"
    launch.simulate(recipes.Recipe.model_validate(values), run_dir=run, trackers=[])
    report.write_report(run)
    report.write_report(run, private=True)
    return run


class Page(HTMLParser):
    """What a page is made of."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.images: list[dict[str, Any]] = []
        self.headings: list[str] = []
        self.resources: list[str] = []
        self.open: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attributes: Any) -> None:
        values = dict(attributes)
        if tag == "img":
            self.images.append(values)
        elif tag in ("h1", "h2", "h3"):
            self.headings.append(tag)
        self.resources += [values[name] for name in ("src", "href") if values.get(name)]
        if tag not in ("img", "meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag


def test_the_page_is_whole(adaptive: Path) -> None:
    text = (adaptive / "report.html").read_text(encoding="utf-8")
    result = RunFolder.open(adaptive).result()
    assert result is not None
    seen = Page(text)
    assert seen.headings[:2] == ["h1", "h2"]
    assert set(seen.headings) == {"h1", "h2"}
    assert [image["alt"].split(" of ")[0].split(" over ")[0] for image in seen.images] == [
        "Bound on the share",
        "Test accuracy",
        "Test loss",
        "Epsilon spent",
        "Noise on the mean update",
        "Bound s_j",
        "Noise scale sigma_j",
        "Signal to noise ratio SNR_j",
        "Share",
        "Norm",
        "Share",
        "Heat map",
    ]
    assert all(len(image["alt"]) > 30 for image in seen.images)
    assert all(resource.startswith("data:image/svg+xml,") for resource in seen.resources)
    for image in seen.images:
        ElementTree.fromstring(unquote(image["src"].partition(",")[2]))
    for told in (result["guarantee"], result["ledger_head"], result["model_sha256"]):
        assert told in text
    assert "epsilon proven" in text
    assert "epsilon claimed" in text


def test_the_page_says_what_each_party_sees(adaptive: Path) -> None:
    text = html.unescape((adaptive / "report.html").read_text(encoding="utf-8"))
    for party in list_parties("central", simulated=True):
        assert party.name in text
        assert party.sees in text
    sees = {trust: dict(list_parties(trust, False))["the server"] for trust in WHO_ADDS_NOISE}
    assert "without noise" in sees["central"]
    assert "without noise" not in sees["local"] + sees["distributed"]


@pytest.mark.parametrize(
    ("unit", "named"), [("example", True), ("client", False)], ids=["rows", "sites"]
)
@pytest.mark.usefixtures("undrawn")
def test_the_page_names_the_sites_whose_rows_are_protected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unit: str, named: bool
) -> None:
    """And not the sites that are protected themselves: a name would say that the site is in the
    data.
    """
    monkeypatch.chdir(tmp_path)
    Path("sites").mkdir()
    random = np.random.default_rng(0)
    names = ["cleveland", "hungarian", "switzerland"]
    for i, file in enumerate(["test.csv", *(f"sites/{name}.csv" for name in names)]):
        age, ill = random.normal(60, 9, 7210 + i), np.arange(7210 + i) % 2
        pandas.DataFrame({"age": age, "ill": ill}).to_csv(file, index=False)
    recipe, quick = "ten-hospitals", {}
    if unit == "client":
        recipe, quick = "digits", {"training.epochs": 1, "training.batch_size": 1000}
    result = simulations.simulate(
        recipe, run_dir="run", model=torch.nn.Linear(1, 2), task="classification",
        data={"train": "sites/*.csv", "test": "test.csv", "target": "ill", "standardise": "test"},
        overrides={"federation.rounds": 2, "privacy.delta": 1e-5, "privacy.accountant": "rdp"} | quick,
    )  # fmt: skip
    stored = (tmp_path / "run" / "provenance.json").read_text(encoding="utf-8")
    text = html.unescape(result.report().read_text(encoding="utf-8"))
    assert [name in text for name in names] == [named] * 3
    assert [name in stored for name in names] == [named] * 3
    assert ("in each of the 2 rounds, the sum of its rows' bounded gradients" in text) == named
    assert not re.search(r"\b721[1-3]\b", re.sub("<img[^>]*>", "", text))  # rows of each site


def test_private_figures_are_in_the_private_page_alone(adaptive: Path) -> None:
    public, private = adaptive / "report.html", adaptive / "private" / "report.html"
    assert "Private diagnostics" not in public.read_text()
    assert "Private diagnostics" in private.read_text()
    assert stat.S_IMODE(private.stat().st_mode) == 0o600
    assert stat.S_IMODE(private.parent.stat().st_mode) == 0o700


def test_the_public_page_does_not_depend_on_private_diagnostics(
    adaptive: Path, tmp_path: Path
) -> None:
    shutil.copytree(adaptive, tmp_path / "run")
    file = tmp_path / "run" / "private" / "diagnostics.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert set(rows[0]) == set(PrivateRow.__annotations__)
    file.write_text(
        "".join(json.dumps(row | {"cohort": 777, "seconds": 777.5}) + "\n" for row in rows)
    )
    report.write_report(tmp_path / "run")
    assert (tmp_path / "run" / "report.html").read_text() == (adaptive / "report.html").read_text()
    shown = report._operator(RunFolder.open(tmp_path / "run").rows(private=True))
    assert "drawn from 777 in round 1" in str(shown)


def test_data_of_ones_own_is_not_pictured_in_public(
    adaptive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(adaptive, tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    recipe = folder.recipe()
    own = recipe.model_copy(
        update={"data": recipe.data.model_copy(update={"name": "fedlgm.data.bundled:digits"})}
    )
    monkeypatch.setattr(RunFolder, "recipe", lambda self: own)
    assert "Examples by client and class" not in str(report._division(folder, private=False))
    assert "Examples by client and class" in str(report._division(folder, private=True))


@pytest.mark.parametrize("name", ["table", "image-folder", "image-folder/private", "hf:owner/name"])
def test_files_that_a_recipe_names_are_not_pictured_in_public(
    adaptive: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    shutil.copytree(adaptive, tmp_path / "run")
    folder = RunFolder.open(tmp_path / "run")
    recipe = folder.recipe()
    own = recipe.model_copy(update={"data": recipe.data.model_copy(update={"name": name})})
    monkeypatch.setattr(RunFolder, "recipe", lambda self: own)
    assert "`fedlgm report --private` shows it" in str(report._division(folder, private=False))


@pytest.mark.slow
def test_correlated_noise_is_shown_over_the_rounds(
    tiny: Callable[..., Recipe], tmp_path: Path
) -> None:
    """A heat map of layers and rounds, the error of the model, and that of independent noise beside
    it."""
    run = tmp_path / "run"
    recipe = tiny(
        federation={"rounds": 6, "sampling": "cyclic", "rate": 0.25},
        privacy={"noise": "banded"},
        run={"trackers": []},
    )
    launch.simulate(recipe, run_dir=run)
    report.write_report(run)
    text = html.unescape((run / "report.html").read_text(encoding="utf-8"))
    for words in (
        "Noise over the rounds", ("The noise of this run is correlated over rounds (banded, 4 bands); "
                                 "4 groups take turns"),
        "independent, same participation", "independent, secret Poisson draws",
        "Noise norm of one round's mean of each layer",
        "Noise norm of the model over the rounds: this run from", ("Noise scale sigma_j (of "
                                                                  "z)"), "noise sigma_j (of z)",
    ):  # fmt: skip
        assert words in text, words
    told = text[text.index("Noise norm of one round's mean of each layer over") :][:200]
    norms = (
        np.array(RunFolder.open(run).rows()[-1]["layer_noise"]) / recipe.sampling.expected
    )  # of the mean
    for norm in (norms.min(), norms.max()):
        assert f" {norm:.4g} " in told, told
    launch.simulate(tiny(run={"trackers": []}), run_dir=tmp_path / "plain")
    report.write_report(tmp_path / "plain")
    plain = (tmp_path / "plain" / "report.html").read_text(encoding="utf-8")
    assert "Noise over the rounds" not in plain
    assert "(of z)" not in plain


@pytest.mark.usefixtures("undrawn")
def test_a_run_without_a_guarantee_says_so(tiny: Callable[..., Recipe], tmp_path: Path) -> None:
    launch.simulate(tiny(mechanism={"name": "none"}), run_dir=tmp_path / "run", trackers=[])
    report.write_report(tmp_path / "run")
    text = (tmp_path / "run" / "report.html").read_text(encoding="utf-8")
    assert '<p class="guarantee none">NOT PRIVATE' in text
    assert "No epsilon is proven for this run" in text


def test_what_cannot_be_reported(
    tiny: Callable[..., Recipe], adaptive: Path, tmp_path: Path
) -> None:
    folder = new_folder.create(tmp_path / "unfinished", tiny())
    with pytest.raises(RunError, match="not finished"):
        report.write_report(folder.path)
    shutil.copytree(adaptive, tmp_path / "run")
    (tmp_path / "run" / "report.html").unlink()
    (tmp_path / "run" / "ledger.sqlite").write_bytes(b"another")
    with pytest.raises(LedgerError):
        report.write_report(tmp_path / "run")
    assert not (tmp_path / "run" / "report.html").exists()


def test_pictures_stay_small_and_keep_their_numbers() -> None:
    rounds, layers = list(range(1, 101)), 160
    values = np.random.default_rng(0).lognormal(size=(len(rounds), layers))
    names = [f"layer{j}" for j in range(layers)]
    many = pictures.per_layer("Bound", names, rounds, values, log=True)
    assert many is not None
    assert len(to_uri(many.svg)) < 100_000
    few = pictures.per_layer("SNR", names[:2], rounds, np.full((100, 2), [1.25e-4, 3.75e-4]))
    assert few is not None
    assert "0.0001" in few.svg
    assert (
        few.alt
        == "SNR of each layer, the same in every round: least 0.000125 (layer0), most 0.000375 "
        "(layer1)."
    )
    assert pictures.per_layer("SNR", names, rounds, np.full((100, layers), np.nan)) is None
    assert pictures.over_rounds("epsilon", [1, 2], {"proven": [float("inf")] * 2}) is None


@pytest.mark.parametrize("rounds", [[1, 2, 3], [10, 20, 30, 40]])
def test_rounds_are_whole_numbers(rounds: list[int]) -> None:
    values = np.linspace(0.25, 0.75, 2 * len(rounds)).reshape(-1, 2)
    curve = pictures.over_rounds("loss", rounds, {"loss": values[:, 0].tolist()})
    for picture in (curve, pictures.per_layer("Norm", ["fc1", "fc2"], rounds, values)):
        assert picture is not None
        ticks = re.findall(r'id="xtick_\d+".*?<text[^>]*>([^<]*)</text>', picture.svg, re.DOTALL)
        assert ticks
        assert all(re.fullmatch(r"\d+", tick) for tick in ticks)


def test_a_division_among_many_clients_is_a_sorted_heat_map(tmp_path: Path) -> None:
    generator = np.random.default_rng(0)
    histogram = generator.multinomial(40, generator.dirichlet([0.1] * 10), size=500)
    histogram[7] = 0
    order = pictures.sorted_clients(histogram)
    assert sorted(order) == list(range(500))
    assert order[-1] == 7
    largest = histogram[order[:-1]].argmax(axis=1)
    assert (np.diff(largest) >= 0).all()
    for clients in (500, 100_000):
        many = histogram[np.arange(clients) % 500]
        picture = pictures.division(many)
        assert len(to_uri(picture.svg)) < 60_000
        assert f"{clients} clients with" in picture.alt
    figures.draw_partition(histogram, "digits, dirichlet", tmp_path / "picture.png")
    figures.draw_partition(histogram[:, :1], "one class", tmp_path / "picture.svg")
    with pytest.raises(RunError, match="cannot write the picture"):
        figures.draw_partition(histogram, "", tmp_path / "nowhere" / "picture.png")


def test_a_notebook_summary(adaptive: Path) -> None:
    folder = RunFolder.open(adaptive)
    result, rows = folder.result(), folder.rows()
    assert result is not None
    layers = page.layer_rows(rows[-1], {"fc1": 520, "fc2": 90})
    text = summary_html(result, rows, layers)
    seen = Page(text)
    assert len(seen.images) == 3
    assert "prefers-color-scheme" not in unquote(text)  # a notebook's theme is not the system's
    for told in ("fc2", "520", "epsilon proven", f"{rows[-1]['clip'][0]:.5g}"):
        assert told in text
    total = float(np.linalg.norm([row["noise_norm"] for row in layers]))
    assert total == pytest.approx(rows[-1]["noise_norm"], rel=1e-4)
    Page(summary_html(result, [], []))


_PROBE = """<!doctype html><body><iframe width="{width}" height="900" style="border:0" srcdoc="{page}"></iframe><script>
addEventListener("load", () => {{
  const page = document.querySelector("iframe").contentDocument;
  const broken = [...page.images].filter(image => !image.complete || image.naturalWidth === 0).length;
  const inner = page.defaultView.innerWidth, wide = page.documentElement.scrollWidth;
  document.body.innerHTML = `probe ${{page.images.length}} ${{broken}} ${{inner}} ${{wide}} end`;
}});
</script></body>"""  # in a frame: a browser's own window is never as narrow as a phone


@pytest.mark.slow
@pytest.mark.skipif(_CHROMIUM is None, reason="no chromium here")
def test_a_browser_shows_every_image_and_scrolls_only_down(adaptive: Path, tmp_path: Path) -> None:
    width = 390  # a phone's
    text = (adaptive / "private" / "report.html").read_text(encoding="utf-8")
    found = browse(text, width, tmp_path)
    assert found == (text.count("<img "), 0, width, found[3])
    assert found[3] <= width
    # The probe sees what it is there for.
    spoilt = text.replace(
        "<main>", '<main><p style="width:500px">wide</p><img alt="" src="data:image/png,none">'
    )
    _, broken, _, wide = browse(spoilt, width, tmp_path)
    assert (broken, wide > width) == (1, True)


def browse(text: str, width: int, folder: Path) -> tuple[int, ...]:
    """Images, images that did not load, width of the window and of the page, as Chromium has
    them."""
    probed = folder / "probed.html"
    probed.write_text(_PROBE.format(width=width, page=html.escape(text)), encoding="utf-8")
    done = subprocess.run(
        [
            str(_CHROMIUM),
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--disable-quic",
            "--no-first-run",
            "--disable-background-networking",
            "--disable-component-update",
            "--disable-sync",
            f"--user-data-dir={folder / 'profile'}",
            "--window-size=1400,1000",
            "--dump-dom",
            probed.as_uri(),
        ],
        capture_output=True,
        text=True,
        check=False,
        timeout=LIMIT_S,
    )
    found = re.search(r"<body>probe (\d+) (\d+) (\d+) (\d+) end", done.stdout)
    assert found is not None, done.stderr
    return tuple(map(int, found.groups()))
