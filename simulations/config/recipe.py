"""The recipe: one TOML file that says everything about a run, for CLI, notebooks and the Flower app alike."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tomli_w
from pydantic import ValidationError, model_validator

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, alternatives, prefix_key
from fedlgm.extension import is_object
from fedlgm.facts import Sampling
from fedlgm.privacy.guarantee import Relation, Unit
from simulations.config import messages
from simulations.config.example_level import check_example_level, check_unit
from simulations.config.messages import OPTIONS, SECTIONS
from simulations.config.sections import (
    IMAGES,
    Data,
    Deployment,
    Federation,
    MechanismSection,
    Model,
    Privacy,
    Risk,
    Run,
    Section,
    TaskSection,
    Training,
)

if TYPE_CHECKING:
    from fedlgm.correlation import Correlation, Workload

BUNDLED = Path(__file__).parents[1] / "recipes"
DEFAULT = "digits"
_DEEPEST = 8

Overrides = Iterable[str] | Mapping[str, Any]
"""Changes of a recipe's values: "section.key=value" texts, or {"section.key": value}."""


class Recipe(Section):
    """A validated recipe; docs/how-to/recipe.md says what each section may hold.

    Sections that do not fit each other are refused: `load` and `validate` raise a `ConfigError`.

    Example:
        >>> recipe = load("digits", ["federation.sampling='fixed'"])
        >>> recipe.sampling.scheme, recipe.relation  # fixed-size sampling proves nothing else
        ('fixed', 'replace-one')
    """

    name: str = "custom"
    title: str = ""
    data: Data
    model: Model
    task: TaskSection = TaskSection()
    federation: Federation
    training: Training = Training()
    mechanism: MechanismSection
    privacy: Privacy
    run: Run = Run()
    deployment: Deployment | None = None
    risk: Risk | None = None

    @model_validator(mode="after")
    def _fits(self) -> Recipe:
        for key, section in (("mechanism", self.mechanism), ("task", self.task)):
            if not is_object(section.name):
                with messages.in_section(key, section.name):
                    section.build()
        if not is_object(self.mechanism.name):
            check_unit(self, mechanisms.unit_of(self.mechanism.name))
        if self.unit == "example":
            check_example_level(self)
        else:
            self._fits_clients()
        return self

    def _fits_clients(self) -> None:
        """Refuse settings that do not fit each other where clients are protected."""
        federation, privacy = self.federation, self.privacy
        for key in ("sampling_rate", "steps", "exact_sums"):
            if getattr(self.training, key) is not None:
                raise ValueError(f"training.{key} is for privacy.unit = 'example': leave it out here")
        self._check_noise()
        if privacy.trust == "local" and privacy.max_participations is None:
            raise ValueError("privacy.max_participations is needed under local trust: every participation costs")
        if privacy.trust == "central" and privacy.max_participations is not None:
            raise ValueError("privacy.max_participations is for privacy.trust = 'local': leave it out here")
        if self.relation != "replace-one" and privacy.trust == "local":
            raise ValueError("privacy.relation must be 'replace-one' under local trust: participation is visible")
        if self.relation != "replace-one" and federation.sampling == "fixed":
            raise ValueError("privacy.relation must be 'replace-one' for fixed-size sampling")

    @property
    def unit(self) -> Unit:
        """Whose data a neighbour changes."""
        return self.privacy.unit or "client"

    def _check_noise(self) -> None:
        """Refuse correlated noise that nobody can account for, and a schema that nobody can keep."""
        privacy, sampling = self.privacy, self.federation.sampling
        if privacy.noise != "independent":
            if privacy.trust == "local":
                raise ValueError(
                    f"privacy.noise = {privacy.noise!r} needs trust = 'central': under local trust every upload is "
                    "seen alone, so noise could only be correlated along one client's own uploads, where independent "
                    "noise has the least last and largest error already"
                )
            if sampling in ("poisson", "fixed"):
                raise ValueError(
                    f"privacy.noise = {privacy.noise!r} needs to know how many rounds lie between a client's "
                    "participations: set federation.sampling to 'cyclic' (fixed groups take turns), 'min-separation' "
                    "(a fixed cohort, nobody again too soon) or 'grouped-poisson' (secret draws within groups), not "
                    f"{sampling!r}"
                )
        wrong = {"bands": ("banded", "square-root"), "buffers": ("blt",)}
        for key, kinds in wrong.items():
            if getattr(privacy, key) is not None and privacy.noise not in kinds:
                raise ValueError(
                    f"privacy.{key} is for privacy.noise = {' or '.join(map(repr, kinds))}: leave it out here"
                )
        if sampling in ("poisson", "fixed"):
            if privacy.min_separation is not None:
                raise ValueError(
                    f"privacy.min_separation: {sampling!r} sampling lets a client take part in any round: set "
                    "federation.sampling to 'cyclic', 'min-separation' or 'grouped-poisson'"
                )
            return
        if privacy.trust == "local":
            raise ValueError(f"federation.sampling = {sampling!r} needs privacy.trust = 'central'")
        if sampling == "grouped-poisson" and privacy.min_separation is None and privacy.bands is None:
            raise ValueError(
                "federation.sampling = 'grouped-poisson' needs privacy.bands or privacy.min_separation, the number of "
                "groups"
            )
        with prefix_key("federation"):
            separation = self.sampling.separation
        rounds = self.federation.rounds
        for name, most in (("federation.rounds", rounds), ("the rounds between participations", separation)):
            if privacy.bands is not None and most is not None and privacy.bands > most:
                raise ValueError(f"privacy.bands = {privacy.bands} is more than {name}, {most}")

    @property
    def sampling(self) -> Sampling:
        """Who takes part when, as the library sees it.

        Raises:
            ConfigError: a separation that the population cannot keep.
        """
        federation, privacy = self.federation, self.privacy
        scheme, share = federation.sampling, federation.share
        if scheme in ("poisson", "fixed"):
            return Sampling(scheme, federation.clients, share)
        separation = privacy.min_separation
        if separation is None and scheme == "grouped-poisson":
            separation = privacy.bands
        if separation is None:
            separation = max(1, int(1 / share + 1e-6))
        return Sampling(scheme, federation.clients, share, separation)

    @property
    def noise(self) -> Correlation | None:
        """How noise is correlated over the rounds; None for independent noise."""
        privacy, rounds = self.privacy, self.federation.rounds
        if privacy.noise == "independent":
            return None
        from fedlgm import correlation  # SciPy's optimisers

        separation, workload = self.sampling.separation or 1, self.workload
        if privacy.noise == "blt":
            buffers = {} if privacy.buffers is None else {"buffers": privacy.buffers}
            return correlation.get("blt", rounds, min_separation=separation, workload=workload, **buffers)
        bands = separation if privacy.bands is None else privacy.bands
        return correlation.get(privacy.noise, rounds, bands=min(bands, rounds), workload=workload)

    @property
    def workload(self) -> Workload:
        """What the server's optimizer makes of the releases, for which noise is correlated: averaging, or momentum.

        Plain averaging also stands in for optimizers that are not linear, and for users' own. No figure of privacy
        depends on it.
        """
        from fedlgm.correlation import Workload

        federation = self.federation
        return Workload(federation.server_momentum if federation.server_optimizer == "momentum" else 0.0)

    @property
    def relation(self) -> Relation:
        """The neighbouring relation: as written, else what sampling and trust call for."""
        if self.privacy.relation is not None:
            return self.privacy.relation
        if self.unit == "example":
            return "add-remove"
        if self.federation.sampling == "min-separation":
            return "zero-out"
        return "replace-one" if self.privacy.trust == "local" or self.federation.sampling == "fixed" else "add-remove"

    def to_toml(self) -> str:
        """The whole recipe, defaults included."""
        return tomli_w.dumps(self.model_dump(exclude_none=True))


_SIZES = frozenset({"rate", "cohort"})
_NAMING = {"mechanism": "name", "model": "name", "task": "name", "data": "partition"}


def names() -> tuple[str, ...]:
    """Bundled recipes.

    Example:
        >>> "digits" in names()
        True
    """
    return tuple(sorted(path.stem for path in BUNDLED.glob("*.toml")))


def load(recipe: str | Path | None = None, overrides: Overrides = ()) -> Recipe:
    """Read a recipe.

    Args:
        recipe: a bundled name, a path of a TOML file, or None for the default.
        overrides: see `override`.

    Raises:
        ConfigError: no such recipe, not TOML, an unknown key, a wrong type or value: with the key's path and the
            reason.

    Example:
        >>> load("digits", ["federation.rounds=3", "privacy.epsilon=2"]).federation.rounds
        3
        >>> load("digits", ["federation.rounds=0"])
        Traceback (most recent call last):
            ...
        fedlgm.errors.ConfigError: federation.rounds: ...
    """
    raw = read(recipe)
    override(raw, overrides)
    return validate(raw)


def read(recipe: str | Path | None = None) -> dict[str, Any]:
    """Plain values of a recipe, with those that it extends; arguments and errors as for `load`.

    Example:
        >>> read("digits")["data"]["name"]
        'digits'
    """
    return _read(_locate(str(recipe or DEFAULT)), depth=0)


def validate(raw: dict[str, Any]) -> Recipe:
    """Recipe of plain values; see `load` for the errors.

    Example:
        >>> validate(read("digits")) == load("digits")
        True
    """
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise ConfigError(messages.explain(raw, error.errors(), Recipe)) from error
    clients = recipe.unit == "client"  # how many examples there are is known when the data are
    if clients and recipe.privacy.delta >= 1 / recipe.federation.clients and recipe.mechanism.name != "none":
        warnings.warn(
            f"privacy.delta = {recipe.privacy.delta:g} is not below 1/{recipe.federation.clients}, one over the number "
            "of clients: such a guarantee allows one client to be given away entirely",
            stacklevel=2,
        )
    return recipe


def _read(path: Path, depth: int) -> dict[str, Any]:
    """Raw values of a recipe file on top of those of the recipe that it `extends`."""
    if depth > _DEEPEST:
        raise ConfigError(f"{path}: `extends` goes deeper than {_DEEPEST} recipes; does one extend itself?")
    try:
        raw = tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML: {error}") from error
    base = raw.pop("extends", None)
    merged = {} if base is None else _read(_locate(str(base)), depth + 1)
    if raw.keys() - {"name", "run"}:
        merged.pop("title", None)  # it described the other recipe
    for key, value in raw.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _laid_over(key, merged[key], value) if both else value
    return merged | {"name": raw.get("name", path.stem)}


def _settings(overrides: Overrides) -> Iterator[tuple[str, Any]]:
    """(path, value) of each override; the value None removes."""
    if isinstance(overrides, Mapping):
        for path, value in overrides.items():
            if not isinstance(path, str):
                raise ConfigError(f"overrides map 'section.key' to a value, got the key {path!r}")
            yield path.strip(), value
        return
    if isinstance(overrides, str):
        raise ConfigError(f"overrides are a list of 'section.key=value' or a mapping, got a str: {overrides!r}")
    for text in overrides:
        if not isinstance(text, str):
            raise ConfigError(f"overrides are a list of 'section.key=value' or a mapping, got {text!r} in it")
        path, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not path:
            raise ConfigError(f"--set takes section.key=value, got {text!r}")
        section, _, key = path.partition(".")
        if value == "none" and not (key and _NAMING.get(section) == key):
            yield path, None
            continue
        try:
            yield path, tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            yield path, value


def _laid_over(section: str, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A section's values over those it had: whatever only the thing named before could use is left behind."""
    kept = dict(below)
    if section == "federation" and above.keys() & _SIZES:
        kept = {key: value for key, value in kept.items() if key not in _SIZES}
    if section == "data" and above.get("name", below.get("name")) != below.get("name"):
        kept.pop("pixels", None)  # other examples, another interval
        if not str(above["name"]).startswith(f"{str(below.get('name')).partition('/')[0]}/"):  # no half of the same set
            kept = {key: value for key, value in kept.items() if key not in IMAGES}
    naming = _NAMING.get(section, "")
    name = above.get(naming, below.get(naming))
    variant = above.get("variant", below.get("variant", "sound")) if section == "mechanism" else None
    if name != below.get(naming) or variant not in (None, below.get("variant", "sound")):
        with suppress(ConfigError):  # an unknown name is reported when the whole recipe is checked
            options = OPTIONS[section](str(name)) if variant is None else mechanisms.options(str(name), str(variant))
            kept = {key: value for key, value in kept.items() if key in {*SECTIONS[section].model_fields, *options}}
    return kept | above


def _locate(recipe: str) -> Path:
    bundled = BUNDLED / f"{recipe}.toml"
    if bundled.is_file():
        return bundled
    path = Path(recipe)
    if path.is_file():
        return path
    raise ConfigError(f"no recipe {recipe!r}: neither a file nor bundled; {bundled_like(recipe)}")


def bundled_like(name: str) -> str:
    """Bundled recipes of a similar name, else how to see all of them; for messages.

    Example:
        >>> bundled_like("digit")
        "did you mean 'digits'?"
    """
    hint = alternatives(name, names())
    return hint if hint.endswith("?") else f"`fedlgm doctor` lists the bundled ones, such as {DEFAULT}"


def override(raw: dict[str, Any], texts: Overrides) -> None:
    """Set values in a recipe's plain values.

    With another mechanism, variant, model or partition scheme, options that it does not know fall away; `rate` and
    `cohort` of [federation] replace each other. The title described the recipe as it was written: where more
    than [run] changes, it falls away.

    Args:
        raw: changed in place.
        texts: "section.key=value" with a TOML value, or "key=value" at the top; a value that is not TOML is taken as a
            string. "section.key=none" removes a value, so that the default holds; mechanism.name=none is a mechanism.
            Or a mapping {"section.key": value}, in which None removes a value.

    Raises:
        ConfigError: not of that form, or a section that is none.

    Example:
        >>> raw = read("digits")
        >>> override(raw, ["privacy.epsilon=2", "mechanism.name=gaussian"])
        >>> raw["privacy"]["epsilon"], raw["mechanism"]["name"]
        (2, 'gaussian')
    """
    sections: dict[str, dict[str, Any]] = {}
    changed: set[str] = set()
    for path, parsed in _settings(texts):
        section, *keys = path.split(".")
        if not section or len(keys) > 1 or not all(keys):
            raise ConfigError(f"--set takes section.key=value, got {path!r}")
        removed = parsed is None
        if not keys:
            changed.add(section)
            if removed:
                raw.pop(section, None)
                sections.pop(section, None)
            else:
                raw[section] = parsed
            continue
        if not isinstance(raw.get(section, {}), dict):
            raise ConfigError(f"--set {path!r}: {section} is not a section")
        if removed:
            raw.setdefault(section, {}).pop(keys[0], None)
            sections.get(section, {}).pop(keys[0], None)
        else:
            sections.setdefault(section, {})[keys[0]] = parsed
        changed.add(section)
    for section, values in sections.items():
        raw[section] = _laid_over(section, raw.get(section, {}), values)
    if changed - {"name", "run"} and "title" not in changed:
        raw.pop("title", None)
