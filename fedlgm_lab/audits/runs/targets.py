"""The targets of `fedlgm audit`: a mechanism, a recipe, or the folder of a finished run."""

from __future__ import annotations

import dataclasses
import json
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from fedlgm import mechanisms
from fedlgm.errors import ConfigError, RunError
from fedlgm.extension.loader import is_reference
from fedlgm.noise.keys import KeyRing
from fedlgm.noise.release import fingerprint, release
from fedlgm.noise.run_noise import RunNoise
from fedlgm.planning.plan import ReleasePlan
from fedlgm.privacy.ledger import SERVER, Ledger
from fedlgm.wording import alternatives
from fedlgm_lab.audits import Audit, AuditResult, Canaries, Check, Subject, audit_record
from fedlgm_lab.audits.audit import Progress, plenty
from fedlgm_lab.audits.probe import checks, probe
from fedlgm_lab.audits.runs.canaries import audit_stored, run_reported
from simulations.config import recipe as recipes
from simulations.config.assembly import Assembly
from simulations.config.decided import resolve_hardware
from simulations.config.overrides import override
from simulations.config.own import Own
from simulations.runs.folder import RunFolder
from simulations.runs.rows import FullRow, RunSummary

Kind = Literal["mechanism", "recipe", "run"]


def kind_of(target: str) -> Kind:
    """Tell whether a target is a mechanism, a recipe or a run's folder.

    Raises:
        ConfigError: the target is none of the three.
    """
    if target in mechanisms.names(None):
        return "mechanism"
    path = Path(target)
    if path.is_dir():
        RunFolder.open(path)
        return "run"
    if target in recipes.names() or path.is_file():
        return "recipe"
    if is_reference(target):  # checked after the paths, because a path may also contain a colon
        return "mechanism"
    similar = alternatives(target, [*mechanisms.names(None), *recipes.names()])
    hint = similar if similar.endswith("?") else "`fedlgm doctor` lists mechanisms and recipes"
    raise ConfigError(
        f"nothing to audit at {target!r}: neither a mechanism, nor a recipe, nor a run's folder; "
        f"{hint}"
    )


def audit_mechanism(
    name: str,
    audit: Audit,
    *,
    variant: str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
    **facts: Any,
) -> AuditResult:
    """Audit a registered mechanism on a small model and artificial updates.

    Args:
        name: name of the mechanism.
        audit: settings of the audit.
        variant: "sound" or "published"; by default the variant in `overrides`, or else "sound".
        overrides: options of the mechanism as "option=value" (TOML values), with or without
            "mechanism." in front.
        progress: called with (done, all).
        facts: epsilon, delta, rounds and rate of the run for which the mechanism is calibrated (see
            `Subject.of`).

    Raises:
        ConfigError: a variant or option is unknown, or the mechanism lacks the variant.
    """
    raw: dict[str, Any] = {"mechanism": {"name": name}}
    override(
        raw, [text if text.startswith("mechanism.") else f"mechanism.{text}" for text in overrides]
    )
    options = {
        key: value for key, value in raw["mechanism"].items() if key not in ("name", "variant")
    }
    chosen = variant or str(raw["mechanism"].get("variant", "sound"))
    return audit.mechanism(Subject.of(name, chosen, **facts, **options), progress)


def audit_recipe(
    recipe: str,
    audit: Audit,
    *,
    variant: str | None = None,
    overrides: Sequence[str] = (),
    progress: Progress | None = None,
) -> AuditResult:
    """Audit the releases that a recipe would make, with its layers, plans and noise, without
    training.

    Args:
        recipe: name of a bundled recipe, or path of a recipe file.
        audit: settings of the audit.
        variant: value for the recipe's key mechanism.variant.
        overrides: changes of the recipe, as "section.key=value".
        progress: called with (done, all).
    """
    extra = [*overrides, *([f"mechanism.variant={variant}"] if variant else [])]
    assembly = Assembly(resolve_hardware(recipes.load(recipe, extra)))
    _refuse_own_steps(assembly)
    return audit.mechanism(subject_of(assembly, f"recipe {assembly.recipe.name}"), progress)


def _refuse_own_steps(assembly: Assembly) -> None:
    """Refuse a recipe whose clients add noise to every local step.

    The message contains a command that audits one client's steps as releases.
    """
    recipe = assembly.recipe
    if recipe.training.sampling_rate is None:  # only local steps have a sampling rate
        return
    facts, mechanism = assembly.privacy.facts, recipe.mechanism
    epsilon, delta = facts.budget()
    steps = facts.releases * (facts.steps.count if facts.steps else 1)
    options = [
        f"--set {shlex.quote(f'{key}={json.dumps(value)}')}"
        for key, value in mechanism.options.items()
    ]
    command = (
        f"fedlgm audit {mechanism.name} --epsilon {epsilon:g} --delta {delta:g} --rounds {steps} "
        f"--rate {recipe.training.sampling_rate:g}"
    )
    raise ConfigError(
        f"{recipe.name}: its clients add noise to every local step and send only the sum of the "
        "steps, so there is no single release to audit; audit the steps of one client: "
        f"{' '.join([command, *options])}"
    )


def subject_of(assembly: Assembly, name: str) -> Subject:
    """Make the subject of an audit from a recipe's mechanism, layers and facts."""
    label = f"{name} ({assembly.model.mechanism.name}, {assembly.model.mechanism.variant})"
    return Subject(label, assembly.privacy.method)


def audit_run(
    run: Path | str, audit: Audit, *, progress: Progress | None = None, own: Own | None = None
) -> AuditResult:
    """Audit a finished run by its canaries, or by drawing its noise again from its seed.

    A seeded run's noise is drawn again for every round from the recorded plans, and canaries are
    added to the sums. The ledger shows whether this noise is the noise that was charged. If
    canaries do not fit the releases (Laplace noise, local trust, plans from private data), the
    recipe's mechanism is audited.

    Args:
        run: the run's folder.
        audit: settings of the audit; "auto" and "one-run-gaussian" audit the noise of the run
            itself, any other method audits its recipe's mechanism.
        progress: called with (done, all).
        own: the Python objects that the run was given.

    Raises:
        RunError: the run is not finished, has neither canaries nor a seed, or was given objects
            that the caller does not pass again; the message gives the remedy.
    """
    started = time.perf_counter()
    folder = RunFolder.open(run)
    _refuse_own_steps(Assembly(folder.recipe(), own))
    result = folder.verified_result()
    objects, given = folder.provenance.read().get("objects"), own or Own()
    if objects and not given:
        names = ", ".join(what for what in objects if what in vars(given))
        raise RunError(
            f"{run} was given Python objects ({names}), which a run folder does not hold: audit it "
            f"in Python with simulations.resume({str(run)!r}, ...).audit(), passing those objects "
            "in place of the dots"
        )
    assembly = Assembly(folder.recipe(), given)
    folder.provenance.check_objects(assembly.fingerprints())
    subject = subject_of(assembly, f"run {folder.path}")
    canaries = audit.method in ("auto", "one-run-gaussian")
    if canaries and list(folder.canaries):
        audit_result = audit_stored(assembly, folder, result, confidence=audit.confidence)
        audit_result = dataclasses.replace(
            audit_result, checks=(*checks(probe(subject)), *audit_result.checks)
        )
    elif not canaries or not subject.alignable:
        return audit.mechanism(subject, progress)
    elif assembly.recipe.run.seed is None:
        raise RunError(
            f"{run} drew its noise from the operating system and had no canaries, so this noise "
            "cannot be drawn again. Run it again with --set run.audit=true (canaries in the run) "
            "or with --seed N (noise that can be drawn again), then audit that run"
        )
    else:
        audit_result = _replay(assembly, folder, result, subject, audit, progress)
    return dataclasses.replace(audit_result, seconds=time.perf_counter() - started)


def _replay(
    assembly: Assembly,
    folder: RunFolder,
    result: RunSummary,
    subject: Subject,
    audit: Audit,
    progress: Progress | None,
) -> AuditResult:
    """Audit a seeded run by canaries that are added to its noise, which is drawn again."""
    layers, recipe = assembly.model.layers, assembly.recipe
    keys = KeyRing.from_seed(recipe.run.seed)
    rows = folder.every_row(result)
    count = audit.canaries or plenty(
        layers.size, -(-len(rows) // (assembly.privacy.facts.sampling.separation or 1))
    )
    canaries = Canaries(layers, count, KeyRing.from_seed(audit.seed).derive(b"canaries"))
    first = assembly.privacy.first_plan()
    with Ledger(folder.ledger_file) as ledger:  # for reading: an auditor's copy may be read-only
        charged = ledger.noise_keys()
    unknown, run_noise = 0, RunNoise()
    for number, row in enumerate(rows, start=1):
        if progress is not None:
            progress(number, len(rows))
        plan, round_ = _recorded_plan(first, row), int(row["round"])
        if plan.size == 0 and plan.facts.noise is None:
            continue
        unknown += (
            round_,
            SERVER,
            fingerprint(keys, round_, SERVER, assembly.model.numerics.noise_backend),
        ) not in charged
        total = torch.zeros(plan.size, dtype=torch.float64)
        watched = plan.size > 0  # correlated noise continues in rounds that release nothing
        if watched:
            canaries.insert(round_, plan, total)
        release(
            total,
            plan,
            keys,
            round_,
            backend=assembly.model.numerics.noise_backend,
            run_noise=run_noise,
        )
        if watched:
            canaries.observe(round_, plan, total)
    record = canaries.record()
    reported = run_reported(assembly, f"run {folder.path}", result)
    audit_result = audit_record(record, layers, reported, confidence=audit.confidence)
    named = Check(
        "noise on the ledger",
        unknown == 0,
        f"{unknown} rounds drew noise that is missing from the ledger"
        if unknown
        else "the ledger names every round's noise",
    )
    return dataclasses.replace(
        audit_result, checks=(*checks(probe(subject)), *audit_result.checks, named)
    )


def _recorded_plan(first: ReleasePlan, row: FullRow) -> ReleasePlan:
    """Rebuild the plan of a finished round from the round's row of metrics.

    Values that the row lacks are taken from the first plan, because they are the same in all
    rounds.
    """
    scales = [float("inf") if value is None else float(value) for value in row["sigma"]]
    return dataclasses.replace(
        first,
        clip=np.array(row["clip"]),
        sigma=np.array(scales),
        released=np.isfinite(scales),
        queries=() if row.get("skipped") else first.queries,
        position=None if first.position is None else int(row["round"]) - 1,  # type: ignore[call-overload]
        notes={},
    )
