"""Recipes: bundled ones, overrides, and what is refused with which words."""

from __future__ import annotations

import re

import numpy as np
import pytest

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.noise.correlation import Workload
from simulations.arguments import resolve
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.overrides import override
from simulations.config.own import Own


@pytest.mark.parametrize("name", recipes.names())
def test_bundled_recipes_are_valid_and_survive_a_round_trip(name, tmp_path):
    recipe = recipes.load(name)
    path = tmp_path / "again.toml"
    path.write_text(recipe.to_toml(), encoding="utf-8")
    assert recipes.load(path) == recipe


def test_the_default_recipe():
    assert recipes.load().name == "digits"
    assert recipes.load() == recipes.load("digits")


def test_overrides_are_toml_values_or_strings():
    overrides = [
        "federation.rounds=5",
        "mechanism.name=uniform",
        "model.hidden=[4, 5]",
        "run.seed=0",
    ]
    recipe = recipes.load("digits", overrides)
    assert (recipe.federation.rounds, recipe.mechanism.name, recipe.run.seed) == (5, "uniform", 0)
    assert recipe.model.options["hidden"] == [4, 5]


@pytest.mark.parametrize("text", ["none", '"none"'])
def test_no_search_is_declared_as_none(text):
    """Beside another key, before and after it, and over what an earlier source says."""
    declared, other = f"statement.searched={text}", "statement.purpose=a test"
    for changes in ([declared], [declared, other], [other, declared]):
        assert recipes.load("digits", changes).statement.searched == "none"
    raw = recipes.read("digits") | {"statement": {"searched": "charged", "purpose": "a test"}}
    override(raw, [declared])
    assert raw["statement"] == {"searched": "none", "purpose": "a test"}


def test_options_of_another_variant_fall_away():
    """The paper's text has no bound of its own, the sound variant no frame."""
    local = ["privacy.trust=local", "privacy.max_participations=3"]
    to_published = [
        "mechanism.name=ladp",
        "mechanism.variant=published",
        "mechanism.batch_share=0.2",
        *local,
    ]
    published = recipes.load("digits", to_published).mechanism
    assert published.options == {"batch_share": 0.2}
    raw = recipes.load("digits", to_published).model_dump(exclude_none=True)
    override(raw, ["mechanism.variant=sound", "mechanism.bound=0.3"])
    assert recipes.Recipe.model_validate(raw).mechanism.options == {"bound": 0.3}
    with pytest.raises(ConfigError, match="no option 'bound'; known: threshold"):
        recipes.load("digits", [*to_published, "mechanism.bound=0.3"])


def test_a_title_goes_with_what_it_described(tmp_path):
    title = recipes.load("digits").title
    assert "500 clients" in title
    assert recipes.load("digits", ["run.seed=7", "name=mine"]).title == title
    for change in ("mechanism.name=uniform", "federation.clients=20", "data.alpha=none"):
        assert recipes.load("digits", [change]).title == ""
        assert recipes.load("digits", [change, "title=Mine"]).title == "Mine"
    file = tmp_path / "own.toml"
    for text, expected in (
        ("[run]\nseed = 7", title),
        ("[privacy]\nepsilon = 1.0", ""),
        ("title = 'Mine'", "Mine"),
    ):
        file.write_text(f"extends = 'digits'\n{text}\n")
        assert recipes.load(file).title == expected
    raw = recipes.read("digits")
    Own(task="regression").into(raw)
    assert "title" not in raw


def test_a_file_removes_what_it_inherits_by_the_text_none(tmp_path):
    file = tmp_path / "mine.toml"
    file.write_text(
        'extends = "digits"\n[run]\nseed = "none"\n[mechanism]\nname = "none"\n', encoding="utf-8"
    )
    recipe = recipes.load(file)
    assert recipe.run.seed is None
    assert recipe.mechanism.name == "none"


def test_extends(tmp_path):
    base = tmp_path / "mine.toml"
    base.write_text('extends = "digits"\n[federation]\nrounds = 7\n', encoding="utf-8")
    recipe = recipes.load(base)
    assert (recipe.name, recipe.federation.rounds, recipe.federation.clients) == ("mine", 7, 500)
    base.write_text(f'extends = "{base}"\n', encoding="utf-8")
    with pytest.raises(ConfigError, match="extend itself"):
        recipes.load(base)


CYCLE = {"sampling": "cyclic", "rate": 0.25}
REFUSED = {
    "unknown key": ({"federation": {"round": 3}}, ["federation.round: unknown key", "rounds"]),
    "unknown section": ({"federations": {}}, ["federations: unknown key", "federation"]),
    "unknown option of a mechanism": (
        {"mechanism": {"bounds": 1.0}},
        ["no option 'bounds'", "bound"],
    ),
    "wrong type": ({"federation": {"rounds": "many"}}, ["federation.rounds", "'many'"]),
    "fraction of a client": ({"federation": {"clients": 2.5}}, ["federation.clients", "2.5"]),
    "no rounds": ({"federation": {"rounds": 0}}, ["federation.rounds", "1"]),
    "name of another type": ({"mechanism": {"name": [1]}}, ["mechanism.name", "must be text"]),
    "learning rate absurd": ({"training": {"lr": 1e300}}, ["training.lr", "at most 1000000000"]),
    "epsilon zero": ({"privacy": {"epsilon": 0}}, ["privacy.epsilon", "above 0"]),
    "epsilon negative": ({"privacy": {"epsilon": -1.0}}, ["privacy.epsilon", "above 0"]),
    "epsilon nan": ({"privacy": {"epsilon": float("nan")}}, ["privacy.epsilon", "finite"]),
    "epsilon infinite": ({"privacy": {"epsilon": float("inf")}}, ["privacy.epsilon", "finite"]),
    "delta one": ({"privacy": {"delta": 1.0}}, ["privacy.delta", "below 1"]),
    "cohort too large": (
        {"federation": {"cohort": 21, "rate": None}},
        ["cohort = 21", "20 clients"],
    ),
    "rate and cohort": (
        {"federation": {"cohort": 5}},
        [("federation: give exactly one of rate"), "cohort"],
    ),
    "neither": ({"federation": {"rate": None}}, ["exactly one of rate"]),
    "rate above one": ({"federation": {"rate": 1.5}}, ["federation.rate", "1"]),
    "unknown mechanism": (
        {"mechanism": {"name": "typo"}},
        ["unknown mechanism 'typo'", *mechanisms.names()],
    ),
    "unknown variant": (
        {"mechanism": {"variant": "draft"}},
        ["mechanism.variant", "sound", "published"],
    ),
    "no published variant": ({"mechanism": {"variant": "published"}}, ["published"]),
    "unknown accountant": (
        {"privacy": {"accountant": "gdp"}},
        ["privacy.accountant", "pld", "rdp", "'gdp'"],
    ),
    "an argument as an option": (
        {"data": {"seed": 1}},
        ["data", "'seed' is not an option", "partition_seed"],
    ),
    "a model's argument": ({"model": {"classes": 3}}, ["model", "'classes' is not an option"]),
    "stale norms without a floor": (
        {"mechanism": {"clip": "med", "norms": "stale", "floor": 0.0}},
        ["'stale' needs floor > 0"],
    ),
    "weights": ({"federation": {"weighting": "num-examples"}}, ["uniform"]),
    "local without a cap": ({"privacy": {"trust": "local"}}, ["privacy.max_participations"]),
    "cap without local": ({"privacy": {"max_participations": 3}}, ["trust = 'local'"]),
    "fixed add-remove": (
        {"federation": {"sampling": "fixed"}, "privacy": {"relation": "add-remove"}},
        ["'replace-one'", "fixed"],
    ),
    "local add-remove": (
        {"privacy": {"trust": "local", "max_participations": 3, "relation": "add-remove"}},
        ["'replace-one'", "local"],
    ),
    "correlated, anybody at any time": (
        {"privacy": {"noise": "banded"}},
        [
            "privacy.noise = 'banded'",
            "'cyclic'",
            "'min-separation'",
            "'grouped-poisson'",
            "not 'poisson'",
        ],
    ),
    "correlated, local": (
        {"privacy": {"noise": "banded", "trust": "local", "max_participations": 3}},
        [
            "needs privacy.trust = 'central'",
            "sees every upload",
            "independent noise already has the least final",
        ],
    ),
    "correlated, local, without a cap": (
        {"federation": CYCLE, "privacy": {"noise": "banded", "trust": "local"}},
        ["needs privacy.trust = 'central'"],
    ),
    "more bands than rounds": (
        {"federation": CYCLE, "privacy": {"noise": "banded", "bands": 4}},
        ["bands = 4", "federation.rounds, 3"],
    ),
    "more bands than groups": (
        {"federation": CYCLE | {"rounds": 9}, "privacy": {"noise": "banded", "bands": 5}},
        ["privacy.bands = 5", "between participations, 4"],
    ),
    "no such cycle": (
        {"federation": {"sampling": "cyclic", "rate": 0.3}},
        ["federation", "1/3", "rate is 0.3"],
    ),
    "too few clients": (
        {
            "federation": {"sampling": "min-separation", "rate": 0.25},
            "privacy": {"min_separation": 5},
        },
        ["population of at least 25, not 20"],
    ),
    "probability above one": (
        {
            "federation": {"sampling": "grouped-poisson", "rate": 0.3},
            "privacy": {"min_separation": 4},
        },
        ["more than 1", "at most 3 groups"],
    ),
    "no number of groups": (
        {"federation": {"sampling": "grouped-poisson"}},
        [("needs privacy.bands or privacy.min_separation")],
    ),
    "separation without a schedule": (
        {"privacy": {"min_separation": 4}},
        ["privacy.min_separation", "'poisson'"],
    ),
    "schedule under local trust": (
        {"federation": CYCLE, "privacy": {"trust": "local", "max_participations": 3}},
        ["'cyclic'", "'central'"],
    ),
    "bands of independent noise": (
        {"federation": CYCLE, "privacy": {"bands": 2}},
        ["privacy.bands is for"],
    ),
    "buffers of bands": (
        {"federation": CYCLE, "privacy": {"noise": "banded", "buffers": 2}},
        ["privacy.buffers is for"],
    ),
    "seed": ({"run": {"seed": -1}}, ["run.seed", "0"]),
    "missing key": ({"privacy": {"epsilon": None}}, ["privacy.epsilon", "required"]),
    "wrong type of an option": ({"mechanism": {"bound": "big"}}, ["bound"]),
}


@pytest.mark.parametrize(("sections", "words"), REFUSED.values(), ids=REFUSED)
def test_refusals_name_the_key_and_the_reason(tiny, sections, words):
    values = dict(sections)
    if "federations" in values:
        with pytest.raises(ConfigError) as caught:
            recipes.load("digits", ["federations.rounds=3"])
    else:
        with pytest.raises(ConfigError) as caught:
            tiny(**values)
    message = str(caught.value)
    for word in words:
        assert word in message
    assert "pydantic" not in message
    assert "Value error" not in message
    assert "\n" not in message


def test_several_mistakes_are_listed_together(tiny):
    with pytest.raises(ConfigError) as caught:
        tiny(federation={"rounds": 0}, privacy={"epsilon": -1})
    assert len(str(caught.value).splitlines()) == 2


def test_a_delta_that_gives_clients_away_is_warned_of(tiny_file):
    with pytest.warns(UserWarning, match="not below 1/20"):
        recipes.load(tiny_file, ["privacy.delta=0.05"])


def test_no_such_recipe_lists_the_bundled_ones(tmp_path):
    with pytest.raises(ConfigError, match="digits"):
        recipes.load("nothing")
    broken = tmp_path / "broken.toml"
    broken.write_text("[data\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="not valid TOML"):
        recipes.load(broken)


@pytest.mark.parametrize(
    "text", ["rounds", "=3", "federation..rounds=3", "name.deep=3", "data.alpha.deep=3"]
)
def test_malformed_overrides(text):
    with pytest.raises(ConfigError, match="--set"):
        recipes.load("digits", [text])
    with pytest.raises(ConfigError, match=r"mechanism\.name"):
        recipes.load("digits", ["mechanism.name=[1]"])


class TestAnotherChoice:
    """Options that only the thing named before could use fall away, those that both know stay."""

    def test_by_override(self):
        recipe = recipes.load("fashion-mnist", ["mechanism.name=gaussian"])
        assert recipe.mechanism.options == {
            "bound": recipes.load("fashion-mnist").mechanism.options["bound"]
        }
        assert recipes.load("digits", ["mechanism.name=none"]).mechanism.options == {}
        assert recipes.load("digits", ["data.partition=iid"]).data.options == {}
        assert recipes.load("digits", ["federation.cohort=20"]).federation.rate is None
        assert recipes.load("digits", ["model.name=logistic"]).model.options == {}

    def test_a_model_takes_no_option_from_another_one_that_has_one_of_the_same_name(
        self, tmp_path, monkeypatch
    ):
        (tmp_path / "nets_of_mine.py").write_text(
            "import torch\n\n\nclass Net(torch.nn.Linear):\n"
            "    def __init__(self, hidden: int = 3):\n        super().__init__(64, 10)\n"
        )
        monkeypatch.syspath_prepend(tmp_path)
        assert recipes.load("digits", ["model.name=nets_of_mine:Net"]).model.options == {}
        assert (
            recipes.load("digits", ["model.name=gru", "model.seed=4"]).model.options == {}
        )  # its hidden is a number
        assert recipes.load(
            "digits", ["model.name=nets_of_mine:Net", "model.hidden=5"]
        ).model.options == {"hidden": 5}
        assert (
            recipes.load("digits", ["model.name=mlp"]).model.options
            == recipes.load("digits").model.options
        )

    @pytest.mark.parametrize("order", [1, -1])
    def test_options_given_with_it_must_fit(self, order):
        fitting = ["data.partition=dirichlet-large", "data.alpha=2"][::order]
        assert recipes.load("digits", fitting).data.options == {"alpha": 2}
        with pytest.raises(ConfigError, match="'none' has no option 'bound'"):
            recipes.load("digits", ["mechanism.name=none", "mechanism.bound=2"][::order])
        with pytest.raises(ConfigError, match="exactly one"):
            recipes.load("digits", ["federation.cohort=20", "federation.rate=0.1"][::order])

    @pytest.mark.parametrize("name", ["table", "image-folder", "mine.data:load", "hf:someone/set"])
    def test_own_data_do_not_take_the_public_seed_of_a_published_set(self, name, tmp_path):
        own = f"data.name={name}"
        given = {
            "table": ["data.file=a.csv", "data.test_file=b.csv", "data.target=y"],
            "image-folder": ["data.dir=."],
        }
        more = [own, *given.get(name, [])]
        assert recipes.load("digits", more).run.seed is None
        assert recipes.load("digits", [*more, "run.seed=3"]).run.seed == 3
        path = tmp_path / "mine.toml"
        path.write_text(f'extends = "digits"\n[data]\nname = "{name}"\n')
        assert recipes.load(path, given.get(name, [])).run.seed is None
        path.write_text(f'extends = "digits"\n[data]\nname = "{name}"\n[run]\nseed = 4\n')
        assert recipes.load(path, given.get(name, [])).run.seed == 4

    def test_nor_that_of_a_bundled_recipe_whose_data_are_a_folder(self):
        assert recipes.load("lm-dp-sgd-celeba", ["data.name=mine.data:load"]).run.seed is None

    @pytest.mark.parametrize(
        ("files", "kept"),
        [
            (['extends = "digits"\n'], None),
            (['extends = "digits"\n[run]\nseed = 7\n'], 7),  # stated, also where it is the same
            (['extends = "digits"\n[run]\nseed = 4\n', 'extends = "0.toml"\n'], 4),
            (['extends = "digits"\n', 'extends = "0.toml"\n[run]\nthreads = 1\n'], None),
            ([(recipes.BUNDLED / "digits.toml").read_text(encoding="utf-8")], 7),
        ],
    )
    def test_a_seed_is_kept_where_the_users_file_states_it(
        self, files, kept, tmp_path, monkeypatch
    ):
        """Own data, passed as an object or by name, make no difference."""
        monkeypatch.chdir(tmp_path)
        for number, text in enumerate(files):
            (tmp_path / f"{number}.toml").write_text(text, encoding="utf-8")
        last = f"{len(files) - 1}.toml"
        objects = {
            "data": {
                "train": (np.zeros((40, 64)), np.arange(40) % 10),
                "test": (np.zeros((4, 64)), [0] * 4),
            }
        }
        assert recipes.load(last, ["data.name=mine.data:load"]).run.seed == kept
        assert resolve(last, objects)[0].run.seed == kept
        assert resolve(recipes.load(last), objects)[0].run.seed == kept
        assert resolve(last, objects, {"run.seed": 7})[0].run.seed == 7  # a call states it
        assert recipes.load(last).run.seed == (kept or 7)
        assert "seed = 7" in recipes.load("digits").to_toml()

    def test_a_published_set_keeps_the_seed(self):
        assert recipes.load("digits", ["data.name=digits/private"]).run.seed == 7
        assert recipes.load("digits", ["data.name=fashion-mnist"]).run.seed == 7
        assert recipes.load("lm-dp-sgd-celeba", ["data.dir=."]).run.seed is not None

    def test_by_another_recipe(self, tmp_path):
        path = tmp_path / "mine.toml"
        path.write_text(
            'extends = "digits"\n[data]\npartition = "iid"\n[mechanism]\nname = "gaussian"\n'
        )
        recipe = recipes.load(path)
        assert (recipe.data.options, recipe.mechanism.name) == ({}, "gaussian")

    @pytest.mark.parametrize("bundled", recipes.names())
    def test_what_recipes_suggest_is_valid(self, bundled):
        text = (recipes.BUNDLED / f"{bundled}.toml").read_text(encoding="utf-8")
        for suggestion in re.findall(r"^#\s+--set ([^\s/=]+=\S+)", text, re.MULTILINE):
            recipes.load(bundled, [suggestion])


class TestNoise:
    """[privacy] noise and the sampling that it needs."""

    def test_what_is_left_out(self, tiny):
        def made(sampling, rate, **privacy):
            recipe = tiny(
                federation={"sampling": sampling, "rate": rate, "rounds": 30}, privacy=privacy
            )
            return recipe.sampling.separation, recipe.noise and recipe.noise.bands, recipe.relation

        assert made("poisson", 0.25) == (None, None, "add-remove")
        assert made("cyclic", 0.25) == (4, None, "add-remove")
        assert made("cyclic", 0.25, noise="banded") == (4, 4, "add-remove")
        assert made("cyclic", 0.25, noise="banded", bands=2) == (4, 2, "add-remove")
        assert made("min-separation", 0.15, noise="banded") == (6, 6, "zero-out")
        assert made("min-separation", 0.15, noise="banded", min_separation=3) == (3, 3, "zero-out")
        assert made("grouped-poisson", 0.25, noise="square-root", bands=3) == (3, 3, "add-remove")
        assert made("grouped-poisson", 0.25, noise="banded", bands=2, min_separation=4) == (
            4,
            2,
            "add-remove",
        )
        assert made("cyclic", 0.25, noise="blt", buffers=1) == (4, None, "add-remove")
        assert made("cyclic", 0.25, noise="banded", relation="replace-one")[2] == "replace-one"

    def test_it_is_made_for_the_server_s_optimizer(self, tiny):
        """Momentum wants another C; the sensitivity of whole cycles, and so the noise, does not
        depend on it."""
        made = {}
        for optimizer in ("sgd", "momentum", "adam"):
            federation = CYCLE | {
                "rounds": 32,
                "server_optimizer": optimizer,
                "server_momentum": 0.8,
            }
            recipe = tiny(federation=federation, privacy={"noise": "banded"})
            made[optimizer] = recipe.noise, Assembly(recipe).privacy.facts.noise_multiplier
        assert made["sgd"] == made["adam"]
        momentum = Workload(momentum=0.8)
        assert made["momentum"][0].error(momentum) < 0.98 * made["sgd"][0].error(momentum)
        assert made["sgd"][0].error() < 0.98 * made["momentum"][0].error()
        assert made["momentum"][1] == pytest.approx(made["sgd"][1], rel=1e-9)

    def test_no_more_bands_than_rounds(self, tiny):
        assert (
            tiny(
                federation={"sampling": "cyclic", "rate": 0.1}, privacy={"noise": "banded"}
            ).noise.bands
            == 3
        )

    @pytest.mark.parametrize(
        ("mechanism", "message"),
        [
            (
                {"name": "time-varying"},
                "time-varying: noise correlated over rounds .* changes over the rounds",
            ),
            ({"name": "dpa"}, "dpa: .* changes over the rounds"),
            ({"name": "laplace-inid"}, "laplace-inid: .* which Laplace noise lacks"),
            ({"name": "none"}, "none: this mechanism adds no noise"),
            (
                {"name": "uniform", "variant": "published", "clip": "med"},
                "uniform: the published variant is not private",
            ),
            (
                {"name": "ladp", "variant": "published"},
                "ladp: the published variant is not private",
            ),
            ({"name": "full-dp", "calibration": "matched"}, "trust = 'local'"),
        ],
    )
    def test_mechanisms_whose_rounds_are_no_one_mechanism(self, tiny, mechanism, message):
        recipe = tiny(federation=CYCLE, privacy={"noise": "banded"}, mechanism=mechanism)
        with pytest.raises(ConfigError, match=message):
            _ = Assembly(recipe).privacy.method

    @pytest.mark.parametrize(
        "name", ["ladp", "sensitive", "adapldp", "full-dp", "gaussian", "gaussian-spr", "uniform"]
    )
    def test_mechanisms_whose_rounds_are(self, tiny, name):
        assembly = Assembly(
            tiny(federation=CYCLE, privacy={"noise": "banded"}, mechanism={"name": name})
        )
        plan = assembly.privacy.method.plan(assembly.privacy.start())
        assert plan.position == 0
        assert plan.guarantee.status == "proven"


def test_a_fixed_cohort_is_rounded_before_it_is_accounted_for(tiny):
    recipe = tiny(federation={"clients": 21, "sampling": "fixed", "rate": 0.5})
    sampling = recipe.sampling
    assert sampling.expected == 10.0
    assert sampling.rate == 10 / 21
    assert recipe.relation == "replace-one"
    assert tiny(federation={"clients": 21, "rate": 0.5}).sampling.expected == 10.5


def test_an_empty_name_is_no_default():
    """A variable of a script that is not set."""
    with pytest.raises(ConfigError, match="no recipe ''"):
        recipes.load("")
