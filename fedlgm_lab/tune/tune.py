"""Private selection: draw the number of runs, make the runs, and publish only the best run.

Source: Papernot and Steinke (ICLR 2022), Theorems 2 and 6. The number of runs, the other runs and
their order may influence published values only through the best run. The names of all files outside
`private/` are therefore fixed before the first run, and the files carry the date of that moment.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import io
import math
import os
import secrets
import time
import traceback
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from safetensors.torch import save_file
from torch import nn

from fedlgm import data as data_sets
from fedlgm.errors import DiskError, DivergedError, RunError
from fedlgm.files import (
    PUBLIC,
    disk_errors,
    draft_folder,
    explain_failure,
    is_used,
    path_of,
    write_durably,
    write_whole,
)
from fedlgm.noise.keys import KeyRing, Purpose
from fedlgm.privacy import Ledger, attack_rates
from fedlgm.privacy.selection import Law, draw_runs
from fedlgm.training.devices import plain_defaults
from fedlgm_lab.tune.search_result import SearchResult
from fedlgm_lab.tune.terms import Search
from simulations import launch
from simulations.api import RunResult
from simulations.arguments import refuse_unknown, resolve
from simulations.config.overrides import Overrides
from simulations.config.own import Own
from simulations.config.recipe import Recipe
from simulations.ending import report_interruption
from simulations.exports.export import model_metadata, texts
from simulations.figures import Figures
from simulations.runs import strict_json
from simulations.runs.folder import SEARCH, RunFolder
from simulations.runs.rows import excerpt

_CHARGED = "the search stays charged and is not continued"


class TuneResult(Figures):
    """The run that a search publishes.

    Attributes:
        epsilon: epsilon against readers of the published model.
        epsilon_all_runs: epsilon against a party that sees the expected number of runs.
        settings: the winning values; empty if there is no model.
        metrics: figures of the model on the test set.
        folder: folder of the search. Everything in it except `private/` may be published.

    Example:
        >>> values = {"epsilon": 6.33, "epsilon_all_runs": 13.89, "folder": "/search", "metrics": {"accuracy": 0.9}}
        >>> TuneResult(values, None)
        TuneResult({}, {'accuracy': 0.9}, epsilon 6.330; /search)
    """

    def __init__(self, values: SearchResult, module: nn.Module | None) -> None:
        super().__init__(values)
        self._module = module
        self.epsilon, self.epsilon_all_runs = values["epsilon"], values["epsilon_all_runs"]
        self.settings: dict[str, Any] = dict(values.get("settings", {}))
        self.metrics: dict[str, float] = dict(values.get("metrics", {}))
        self.folder = Path(values["folder"]).absolute()

    @property
    def accuracy(self) -> float | None:
        """Accuracy on the test set; None for a task without accuracy."""
        return self.metrics.get("accuracy")

    def model(self) -> nn.Module:
        """Return the published model, in evaluation mode.

        Raises:
            RunError: there is no model.
        """
        if self._module is None:
            raise RunError(
                f"{self.folder} publishes no model, because no run of the search produced one"
            )
        return self._module

    def __repr__(self) -> str:
        return f"TuneResult({self.settings}, {self.metrics}, epsilon {self.epsilon:.3f}; {self.folder})"


@plain_defaults()
def tune(
    recipe: str | Path | Recipe | None = None,
    *,
    search: Mapping[str, Sequence[Any]] | None = None,
    expected_runs: float = 10,
    law: Law = "logarithmic",
    score_epsilon: float | None = None,
    overrides: Overrides = (),
    folder: Path | str | None = None,
    **objects: Any,
) -> TuneResult:
    """Search settings privately, and publish only the best run.

    A secret number of runs is made in this process, each with settings drawn at random. They are
    compared by the task's headline metric on the public test set or, with `score_epsilon`, by a
    noised score of the private training data (`fedlgm_lab.tune.score.PrivateScore` has the proof).
    The whole search, every score included, is charged before its first run. A search that was
    stopped stays charged and cannot be continued. The unit and the neighbouring relation are taken
    from the recipe.

    Args:
        recipe: as for `simulate`; its budget is the budget of one run.
        search: {"section.key": [values]}; a run draws each combination with the same probability.
            All combinations must cost the same, so keys that change noise or releases are refused.
        expected_runs: mean of the number of runs, above 1 (Poisson: at least 1).
        law: law of this number: "logarithmic" (the cheapest), "geometric" or "poisson".
        score_epsilon: epsilon of a single score of the private data, at the recipe's delta; None
            uses the public test set.
        overrides: as for `simulate`.
        folder: folder to create; default: `runs/<recipe>-search-<time>`.
        objects: model, task, data, users, mechanism, partition, server_optimizer, as for
            `simulate`.

    Returns:
        The published run, with both epsilons.

    Raises:
        ConfigError: as in `Search.of`.
        RunError: the folder exists, because a search is made only once.

    Example:
        >>> import simulations, tempfile
        >>> found = simulations.tune(
        ...     "digits", search={"federation.server_lr": [0.1, 0.2]}, expected_runs=1.5,
        ...     overrides={"federation.rounds": 2}, folder=tempfile.mkdtemp() + "/search",
        ... )
        >>> found["epsilon_one_run"] < found.epsilon, sorted(path.name for path in found.folder.iterdir())
        (True, ['ledger.sqlite', 'model.safetensors', 'private', 'recipe.toml', 'result.json', 'search.json'])
    """
    users = objects.pop("users", None)
    refuse_unknown("tune", objects, [field.name for field in dataclasses.fields(Own)])
    objects["data"] = data_sets.with_users(objects.get("data"), users)
    base, own = resolve(recipe, objects, overrides)
    planned = Search.of(base, search or {}, expected_runs, law, own, score_epsilon)
    default = Path("runs") / f"{base.name}-search-{time.strftime('%Y%m%d-%H%M%S')}"
    target = default if folder is None else path_of("folder", folder)
    _create(target, planned)
    try:
        with disk_errors(target, "search"):
            return _Searching(planned, target, own).search_and_publish()
    except (KeyboardInterrupt, SystemExit):
        report_interruption(
            f"interrupted; {target} stays charged with the whole search, and a search is not "
            "continued"
        )
        raise


def _create(path: Path, planned: Search) -> None:
    """Make the folder of a search, with the search's terms, the ledger that charges the complete
    search, and the folder `private/`.

    Raises:
        RunError: the folder exists and is not empty, or cannot be created.
    """
    if is_used(path):
        raise RunError(
            f"{path} already exists: a search is made once and never continued, because the number "
            "of its runs must not depend on their results; a stopped search stays charged, and "
            "a new search is charged again: choose another folder"
        )
    try:
        with draft_folder(path) as draft:
            draft.mkdir(parents=True)
            (draft / "private").mkdir(mode=0o700)
            strict_json.write(draft / SEARCH, planned.terms)
            owner = hashlib.sha256((draft / SEARCH).read_bytes()).hexdigest()
            with Ledger(draft / "ledger.sqlite", owner) as ledger:
                key = hashlib.sha256(secrets.token_bytes(32)).hexdigest()
                ledger.charge(planned.event, round=1, key=key, protects=planned.terms["protects"])
    except OSError as error:
        raise DiskError(
            explain_failure(f"cannot create the folder {path}", error, "choose another folder")
        ) from error


class _Searching:
    """One search, charged in its folder."""

    def __init__(self, planned: Search, folder: Path, own: Own) -> None:
        self._planned, self._folder, self._own = planned, folder, own
        self._keys = KeyRing.from_seed(planned.base.run.seed).derive(b"search")

    def search_and_publish(self) -> TuneResult:
        """Run the search, and publish its best run."""
        best = self._best()
        values = cast(SearchResult, {**self._planned.terms, "folder": str(self._folder)})
        if best is not None:
            result, index, score = best
            self._publish(result, index)
            if self._planned.score.noise:
                values["published_score"] = score
            values["settings"], values["metrics"] = self._planned.settings[index], result.metrics
            values["model_sha256"] = str(result["model_sha256"])
        stored = {key: value for key, value in values.items() if key != "folder"}
        strict_json.write(self._folder / "result.json", stored)
        self._date()
        return TuneResult(values, None if best is None else best[0].model())

    def _best(self) -> tuple[RunResult, int, float] | None:
        """Make the runs; return the best run, the index of its candidate and its score, or None."""
        planned, generator = self._planned, self._keys.numpy_generator(Purpose.SELECTION)
        count = draw_runs(planned.terms["expected_runs"], planned.terms["law"], generator)
        choices = generator.integers(len(planned.candidates), size=count)
        best: tuple[RunResult, int, float] | None = None
        rows = []
        for number, index in enumerate(choices.tolist()):
            result, score = self._run(number, planned.candidates[index])
            rows.append({"run": number, "settings": planned.settings[index], "score": score})
            if result is not None and (best is None or score > best[2]):
                best = (result, index, score)
            lines = "".join(strict_json.dumps(row) + "\n" for row in rows)
            write_durably(self._folder / "private" / "runs.jsonl", lines.encode())
        return best

    def _run(self, number: int, candidate: Recipe) -> tuple[RunResult | None, float]:
        """Make one run and its score without any output; return no result if the run diverged."""
        seed = candidate.run.seed
        if seed is not None:  # every run has its own noise
            seed = int(self._keys.words(1, Purpose.SELECTION, number)[0])
        run = candidate.run.model_copy(update={"seed": seed, "trackers": []})
        path = self._folder / "private" / "runs" / f"{number:04d}"
        silent = (
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        )
        with silent[0], silent[1], warnings.catch_warnings():
            warnings.simplefilter("ignore")  # output would reveal the secret number of runs
            try:
                summary = launch.simulate(
                    candidate.model_copy(update={"run": run}),
                    engine="local",
                    run_dir=path,
                    own=self._own,
                )
                result, keys = (
                    RunResult(summary, self._own),
                    self._keys.derive(b"score", number.to_bytes(8, "little")),
                )
                score = self._planned.score.of(summary, result.module(), keys)
            except DivergedError:
                return None, -math.inf
            # the message may name the run, and so reveal how many runs there were
            except Exception as error:
                report = self._folder / "private" / "error.txt"
                said = f"{report} states the error"
                try:
                    write_durably(report, "".join(traceback.format_exception(error)).encode())
                except OSError as refused:
                    said = explain_failure("its report cannot be written", refused)
                raise RunError(f"a run of the search failed ({said}): {_CHARGED}") from None
            return result, score if math.isfinite(score) else -math.inf

    def _publish(self, result: RunResult, index: int) -> None:
        """Write the winner's model and settings."""
        module, terms = result.model(), self._planned.terms
        winner = self._planned.candidates[index]
        write_durably(self._folder / "recipe.toml", winner.to_toml().encode(), PUBLIC)
        state: dict[str, torch.Tensor] = {
            k: v.detach().clone().contiguous() for k, v in module.state_dict().items()
        }
        with Ledger(self._folder / "ledger.sqlite") as ledger:
            head, rates = str(ledger.head()), attack_rates(ledger)
        told = excerpt(("mechanism", "variant", "rounds", "model_sha256"), result)
        protection = {
            **told,
            **terms,
            "attack_rates": rates.figures(),
            "attack": rates.sentence(winner.units),
            "ledger_head": head,
        }  # these figures belong to the search; a single run has cost less
        description = model_metadata(
            RunFolder.open(result.folder), protection, winner.to_toml(), module
        )
        metadata = texts(description) | {"search": strict_json.dumps(terms)}
        write_whole(
            self._folder / "model.safetensors",
            lambda partial: save_file(state, partial, metadata=metadata),
        )

    def _date(self) -> None:
        """Set the times of all public files to the time of the charge, because the end time of a
        search would reveal its number of runs.
        """
        charged = (self._folder / SEARCH).stat().st_mtime
        for path in (*self._folder.iterdir(), self._folder):
            os.utime(path, (charged, charged))
