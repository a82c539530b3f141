"""The recipe: one TOML file that says everything about a run, for CLI, notebooks and the Flower app alike."""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import tomli_w
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from fedlgm import data, mechanisms, models, tasks
from fedlgm.devices import NoiseChoice
from fedlgm.errors import ConfigError, prefix_key
from fedlgm.extension import is_object, is_reference, missing_object
from fedlgm.facts import Sampling, Scheme
from fedlgm.mechanisms import Mechanism
from fedlgm.privacy.guarantee import Relation, Unit
from fedlgm.tasks import Task
from fedlgm.training import LocalTraining
from simulations.config.example_level import check_example_level, check_unit
from strategies.server_optimizer import Name as OptimizerName

if TYPE_CHECKING:
    from fedlgm.correlation import Correlation, Workload

BUNDLED = Path(__file__).parents[1] / "recipes"
DEFAULT = "digits"
_DEEPEST = 8
_LARGEST = 1e9  # float32 still multiplies with it


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class _OpenSection(BaseModel):
    """A section whose further keys are options of the thing it names."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    taken: ClassVar[frozenset[str]] = frozenset()  # arguments that are not options

    @model_validator(mode="after")
    def _options_are_options(self) -> Self:
        wrong = sorted(self.options.keys() & self.taken)
        if wrong:
            raise ValueError(
                f"{wrong[0]!r} is not an option; known here: {', '.join(type(self).model_fields)}, and more"
            )
        return self

    @property
    def options(self) -> dict[str, Any]:
        """The further keys."""
        return dict(self.model_extra or {})


class Data(_OpenSection):
    """[data]: the data set and how it is split; further keys are options of the partition scheme.

    `image_size`, `channels` and `attribute` are for name = "image-folder", whose folder is `dir`. `pixels` is the
    interval of a bundled image set's values; left out, [-1, 1].
    """

    taken: ClassVar[frozenset[str]] = frozenset({"labels", "clients", "ring", "scheme", "seed", "users", "self"})

    name: str
    dir: str | None = None
    partition: str = "dirichlet"
    partition_seed: int = 0
    image_size: int | None = Field(default=None, ge=4, le=4096)
    channels: Literal[1, 3] | None = None
    attribute: str | None = None
    pixels: tuple[float, float] | None = None

    @property
    def images(self) -> dict[str, Any]:
        """Options of image sets that are given."""
        return self.model_dump(include={"image_size", "channels", "attribute", "pixels"}, exclude_none=True)


class Model(_OpenSection):
    """[model]: name; further keys are options of the model. `seed` initialises it; left out, it is the run's (or 0)."""

    taken: ClassVar[frozenset[str]] = frozenset({"in_shape", "classes", "self"})

    name: str
    seed: int | None = Field(default=None, ge=0, lt=2**128)


class TaskSection(_OpenSection):
    """[task]: what the model is trained for; further keys are options of the task."""

    name: str = "classification"

    def build(self) -> Task:
        """The task itself."""
        if is_object(self.name):
            raise missing_object(self.name, "task")
        return tasks.get(self.name, **self.options)


class Federation(_Section):
    """[federation]: who takes part and what the server does; `sampling`: see `fedlgm.facts.Sampling`."""

    clients: int = Field(ge=1)
    rounds: int = Field(ge=1)
    sampling: Scheme = "poisson"
    rate: float | None = Field(default=None, gt=0, le=1)
    cohort: int | None = Field(default=None, ge=1)
    server_optimizer: str = "sgd"
    server_lr: float = Field(default=1.0, gt=0, le=_LARGEST)
    server_momentum: float = Field(default=0.9, ge=0, lt=1)
    weighting: Literal["uniform"] = "uniform"
    dropout: float = Field(default=0.0, ge=0, lt=1)
    stragglers: float = Field(default=0.0, ge=0, le=1)
    wait_for_nodes: float = Field(default=120.0, gt=0, le=_LARGEST)
    round_timeout: float | None = Field(default=None, gt=0, le=_LARGEST)
    quorum: float | None = Field(default=None, gt=0, le=1)
    max_failures: int | None = Field(default=None, ge=0)

    @field_validator("weighting", mode="before")
    @classmethod
    def _weights_are_uniform(cls, value: object) -> object:
        if value == "num-examples":
            raise ValueError(
                "weights by example counts let one client's weight exceed its bound and reveal its size: clients weigh "
                "alike, 'uniform'"
            )
        return value

    @field_validator("server_optimizer")
    @classmethod
    def _known_optimizer(cls, value: str) -> str:
        if value not in get_args(OptimizerName) and not (is_reference(value) or is_object(value)):
            known = ", ".join(get_args(OptimizerName))
            raise ValueError(f"unknown server optimizer; known: {known}, or your own as 'package.module:name'")
        return value

    @model_validator(mode="after")
    def _one_size(self) -> Federation:
        if self.clients == 1 and self.rate is None and self.cohort is None:
            return self
        if (self.rate is None) == (self.cohort is None):
            raise ValueError("give exactly one of rate (share of clients) and cohort (number of clients)")
        if self.cohort is not None and self.cohort > self.clients:
            raise ValueError(f"cohort = {self.cohort} is more than the {self.clients} clients there are")
        return self

    @property
    def share(self) -> float:
        """Share of the clients that is expected in a round: `rate`, or that of `cohort`; of whole clients if fixed."""
        rate = self.rate if self.rate is not None else (self.cohort or 1) / self.clients
        if self.sampling in ("fixed", "min-separation"):
            rate = max(1, round(rate * self.clients)) / self.clients
        return rate


class Training(_Section):
    """[training]: what a client does locally.

    With example-level privacy whose noise the server adds, a round is one step: `batch_size` is the expected Poisson
    batch, and `optimizer`, `lr` and `momentum` are those of the step. Where clients add the noise, every round has
    `steps` steps (left out: `epochs` times 1 / `sampling_rate`), for each of which every example is drawn with the
    public probability `sampling_rate`; the noisy sum is divided by `batch_size`.
    """

    optimizer: Literal["sgd", "adam"] = "sgd"
    lr: float = Field(default=0.1, gt=0, le=_LARGEST)
    momentum: float = Field(default=0.0, ge=0, lt=1)
    epochs: int = Field(default=1, ge=1)
    batch_size: int = Field(default=32, ge=1)
    sampling_rate: float | None = Field(default=None, gt=0, le=1)
    steps: int | None = Field(default=None, ge=1)
    gradient_clip: float | None = Field(default=None, gt=0, le=_LARGEST)
    vectorize: Literal["off", "on", "auto"] = "off"
    width: int | None = Field(default=None, ge=1)
    compile: bool | Literal["auto"] = False
    device: str = Field(default="cpu", pattern=r"^(auto|cpu|cuda(:\d+)?|mps|xpu)$")

    @property
    def local(self) -> LocalTraining:
        """As the library sees it."""
        return LocalTraining(**self.model_dump(include=set(LocalTraining.__dataclass_fields__)))


class MechanismSection(_OpenSection):
    """[mechanism]: name, variant and the layer grouping; further keys are options of the mechanism."""

    name: str
    variant: Literal["sound", "published"] = "sound"
    group_by: Literal["module", "tensor"] = "module"

    def build(self) -> Mechanism:
        """The mechanism itself."""
        if is_object(self.name):
            raise missing_object(self.name, "mechanism")
        return mechanisms.get(self.name, variant=self.variant, **self.options)


class Privacy(_Section):
    """[privacy]: the budget of the whole run, of each `unit` ("client", the default, or "example").

    Where clients noise their own example-level steps (unit = "example", trust = "local") it is each client's.

    `noise` is "independent" in every round, or correlated over the rounds: "banded" (least error of the models after
    each round), "square-root" (closed form) or "blt" (`buffers` vectors of state instead of `bands` - 1). It needs a
    `sampling` that keeps rounds between a client's participations; `min_separation` is their number (of groups, under
    cyclic and grouped-poisson sampling). Left out, it is the largest that the population can keep, or `bands`; and
    `bands` is `min_separation`.
    """

    epsilon: float = Field(gt=0)
    delta: float = Field(gt=0, lt=1)
    accountant: Literal["pld", "rdp"] = "pld"
    unit: Literal["client", "example"] | None = None
    trust: Literal["central", "local"] = "central"
    relation: Relation | None = None
    max_participations: int | None = Field(default=None, ge=1)
    noise: Literal["independent", "banded", "square-root", "blt"] = "independent"
    bands: int | None = Field(default=None, ge=1)
    buffers: int | None = Field(default=None, ge=1, le=8)
    min_separation: int | None = Field(default=None, ge=1)
    noise_backend: NoiseChoice = "auto"


class Run(_Section):
    """[run]: seed and engine settings. `seed`, `block_size`, `threads` and `audit` are part of the result's bits.

    A `seed` is public: it makes a simulation reproducible and its noise predictable. Real nodes refuse it unless
    `test_mode` says that nothing needs protection. With `audit` canaries take part in every round of a simulation, and
    the summary says what they show.
    `trackers` follow the run: tensorboard, mlflow, wandb, or your own as "package.module:name"; left out, TensorBoard
    where it is installed.
    """

    seed: int | None = Field(default=None, ge=0, lt=2**128)
    block_size: int = Field(default=8, ge=1)
    threads: int = Field(default=1, ge=1)
    evaluate_every: int = Field(default=1, ge=1)
    checkpoint_every: int = Field(default=1, ge=1)
    workers: int | None = Field(default=None, ge=1)
    test_mode: bool = False
    audit: bool = False
    trackers: list[str] | None = None


class Risk(_Section):
    """[risk]: what `fedlgm risk` measures the layers' membership risk on. Nothing of it is used in a run.

    `data` names a public set; left out, it is the public half of a set whose private half is [data], else its test
    examples. The rest is as in `fedlgm.example_level.risk.ShadowTraining`.
    """

    data: str | None = None
    dir: str | None = None
    attribute: str | None = None
    examples: int | None = Field(default=None, ge=1)
    members: float = Field(default=0.5, gt=0, lt=1)
    epochs: int = Field(default=30, ge=1)
    lr: float = Field(default=1e-3, gt=0, le=_LARGEST)
    batch_size: int = Field(default=64, ge=1)
    adversary_epochs: int = Field(default=30, ge=1)


class Deployment(_Section):
    """[deployment]: how long a round waits for nodes that are gone; see `strategies.node_grid.Patience`."""

    offline_seconds: float = Field(default=30.0, gt=0)
    give_up_seconds: float = Field(default=3600.0, gt=0)


class Recipe(_Section):
    """A validated recipe."""

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
                with prefix_key(key):
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
        for key in ("sampling_rate", "steps"):
            if getattr(self.training, key) is not None:
                raise ValueError(f"training.{key} belongs to privacy.unit = 'example'")
        if privacy.trust == "local" and privacy.max_participations is None:
            raise ValueError("privacy.max_participations is needed under local trust: every participation costs")
        if privacy.trust == "central" and privacy.max_participations is not None:
            raise ValueError("privacy.max_participations belongs to trust = 'local'")
        if self.relation != "replace-one" and privacy.trust == "local":
            raise ValueError("privacy.relation must be 'replace-one' under local trust: participation is visible")
        if self.relation != "replace-one" and federation.sampling == "fixed":
            raise ValueError("privacy.relation must be 'replace-one' for fixed-size sampling")
        self._check_noise()

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
                raise ValueError(f"privacy.{key} belongs to privacy.noise = {' or '.join(map(repr, kinds))}")
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
_SECTIONS: dict[str, type[BaseModel]] = {
    "mechanism": MechanismSection,
    "model": Model,
    "task": TaskSection,
    "data": Data,
}
_OPTIONS: dict[str, Callable[[str], Iterable[str]]] = {
    "mechanism": mechanisms.options,
    "model": models.options,
    "task": tasks.options,
    "data": data.scheme_options,
}


def names() -> tuple[str, ...]:
    """Bundled recipes."""
    return tuple(sorted(path.stem for path in BUNDLED.glob("*.toml")))


def load(recipe: str | Path | None = None, overrides: Iterable[str] = ()) -> Recipe:
    """Read a recipe.

    Args:
        recipe: a bundled name, a path of a TOML file, or None for the default.
        overrides: see `override`.

    Raises:
        ConfigError: no such recipe, not TOML, an unknown key, a wrong type or value: with the key's path and the
            reason.
    """
    raw = read(recipe)
    override(raw, overrides)
    return validate(raw)


def read(recipe: str | Path | None = None) -> dict[str, Any]:
    """Plain values of a recipe, with those that it extends; see `load`."""
    return _read(_locate(str(recipe or DEFAULT)), depth=0)


def validate(raw: dict[str, Any]) -> Recipe:
    """Recipe of plain values; see `load` for the errors."""
    try:
        recipe = Recipe.model_validate(raw)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(item) for item in error.errors())) from error
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
    for key, value in raw.items():
        both = isinstance(value, dict) and isinstance(merged.get(key), dict)
        merged[key] = _laid_over(key, merged[key], value) if both else value
    return merged | {"name": raw.get("name", path.stem)}


def _laid_over(section: str, below: dict[str, Any], above: dict[str, Any]) -> dict[str, Any]:
    """A section's values over those it had: whatever only the thing named before could use is left behind."""
    kept = dict(below)
    if section == "federation" and above.keys() & _SIZES:
        kept = {key: value for key, value in kept.items() if key not in _SIZES}
    if section == "data" and above.get("name", below.get("name")) != below.get("name"):
        kept.pop("pixels", None)  # other examples, another interval
    naming = _NAMING.get(section, "")
    name = above.get(naming, below.get(naming))
    variant = above.get("variant", below.get("variant", "sound")) if section == "mechanism" else None
    if name != below.get(naming) or variant not in (None, below.get("variant", "sound")):
        with suppress(ConfigError):  # an unknown name is reported when the whole recipe is checked
            options = _OPTIONS[section](str(name)) if variant is None else mechanisms.options(str(name), str(variant))
            kept = {key: value for key, value in kept.items() if key in {*_SECTIONS[section].model_fields, *options}}
    return kept | above


def _locate(recipe: str) -> Path:
    bundled = BUNDLED / f"{recipe}.toml"
    if bundled.is_file():
        return bundled
    path = Path(recipe)
    if path.is_file():
        return path
    raise ConfigError(f"no recipe {recipe!r}: neither a file nor bundled; bundled: {', '.join(names())}")


def override(raw: dict[str, Any], texts: Iterable[str]) -> None:
    """Set values in a recipe's plain values.

    With another mechanism, variant, model or partition scheme, options that it does not know fall away; `rate` and
    `cohort` of [federation] replace each other.

    Args:
        raw: changed in place.
        texts: "section.key=value" with a TOML value, or "key=value" at the top; a value that is not TOML is taken as a
            string. "section.key=none" removes a value, so that the default holds; mechanism.name=none is a mechanism.

    Raises:
        ConfigError: not of that form, or a section that is none.
    """
    sections: dict[str, dict[str, Any]] = {}
    for text in texts:
        path, equals, value = text.partition("=")
        section, *keys = path.strip().split(".")
        if not equals or not section or len(keys) > 1 or not all(keys):
            raise ConfigError(f"--set takes section.key=value, got {text!r}")
        try:
            parsed = tomllib.loads(f"value = {value}")["value"]
        except tomllib.TOMLDecodeError:
            parsed = value.strip()
        removed = value.strip() == "none" and _NAMING.get(section) not in keys
        if not keys:
            if removed:
                raw.pop(section, None)
                sections.pop(section, None)
            else:
                raw[section] = parsed
            continue
        if not isinstance(raw.get(section, {}), dict):
            raise ConfigError(f"--set {text!r}: {section} is not a section")
        if removed:
            raw.setdefault(section, {}).pop(keys[0], None)
            sections.get(section, {}).pop(keys[0], None)
        else:
            sections.setdefault(section, {})[keys[0]] = parsed
    for section, values in sections.items():
        raw[section] = _laid_over(section, raw.get(section, {}), values)


def _explain(item: Any) -> str:
    path = ".".join(str(part) for part in item["loc"])
    message = item["msg"].removeprefix("Value error, ")
    if item["type"] == "extra_forbidden":
        sections: dict[str, type[BaseModel]] = {
            name: field.annotation  # type: ignore[misc]
            for name, field in Recipe.model_fields.items()
            if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel)
        }
        owner: type[BaseModel] = sections.get(str(item["loc"][0]), Recipe) if len(item["loc"]) > 1 else Recipe
        return f"{path}: unknown key; known here: {', '.join(owner.model_fields)}"
    if item["type"] == "string_pattern_mismatch" and path == "training.device":
        message = "must be auto, cpu, cuda, cuda:N, mps or xpu"
    given = f", got {item['input']!r}" if path and not isinstance(item["input"], dict) else ""
    return f"{path}: {message}{given}" if path else message
