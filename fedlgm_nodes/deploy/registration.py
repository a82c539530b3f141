"""Registration of a run with a deployment's signer, which then signs the run's questions."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from fedlgm.errors import FedlgmError, RunError
from fedlgm.files import explain_failure, write_durably
from fedlgm.planning.layers import LayerTable
from fedlgm.planning.plan import ReleasePlan
from fedlgm_nodes.protocol.messages import Question, canonical

_LABEL = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
_ROUNDING = 1 - 1e-6


class Registration(BaseModel):
    """What the signer knows about a registered run, from which it decides whether a question
    belongs to this run.

    Attributes:
        work: the requested work.
        clients: number of enrolled nodes.
        facts: the run's public facts, in the form in which the JSON text of its plans states them.
        family, bounded_by: fields of the run's plans.
        layers: sizes of the mechanism's layers, by name.
        multipliers: for each round, the smallest effective noise multiplier that the round's plan
            may have.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    work: dict[str, Any]
    clients: int = Field(ge=1)
    facts: dict[str, Any]
    family: str
    bounded_by: str
    layers: dict[str, int]
    multipliers: list[float]

    def save(self, folder: Path, run: str) -> None:
        """Write the registration to the signer's folder of registered runs."""
        write_durably(folder / f"{run}.json", self.model_dump_json(indent=1).encode())

    @classmethod
    def load(cls, folder: Path, run: str) -> Registration | None:
        """The registration of a run; None if it was not registered.

        Raises:
            RunError: the registration is damaged.
        """
        file = folder / f"{run}.json"
        if not _LABEL.fullmatch(run) or not file.is_file():
            return None
        try:
            return cls.model_validate_json(file.read_bytes())
        except (OSError, ValidationError) as error:
            raise RunError(
                explain_failure(f"the registration {file} cannot be used", error)
            ) from error

    def problem(self, question: Question) -> str:
        """The reason why a question does not belong to this run; empty if it does."""
        if not 1 <= question.round <= len(self.multipliers):
            return f"the run has {len(self.multipliers)} rounds and no round {question.round}"
        if not 0 <= question.client < self.clients:
            return f"the run has no client {question.client}"
        if canonical(question.work) != canonical(self.work):
            return "nodes are asked for work that was not registered"
        try:
            plan = ReleasePlan.from_json(LayerTable.from_sizes(self.layers), question.plan)
        except (FedlgmError, ValueError, TypeError, RecursionError) as error:
            return f"its plan cannot be read: {error}"[:300]
        if not plan.protected or canonical(plan.facts.to_dict()) != canonical(self.facts):
            return "its plan belongs to another run: its facts are not those that were registered"
        if (plan.family, plan.bounded_by) != (self.family, self.bounded_by):
            return "its bounds or noise are not those that were registered"
        least = self.multipliers[question.round - 1]
        if not plan.effective_multiplier >= least * _ROUNDING:
            return (
                f"its plan has a noise multiplier of {plan.effective_multiplier:.6g}, "
                f"but {least:.6g} was registered"
            )
        return ""


def registered_runs(folder: Path, stem: str) -> list[str]:
    """Names of a recipe's registered runs, the newest last."""
    return sorted(
        (path.stem for path in folder.glob(f"{stem}-*.json") if number(path.stem)), key=number
    )


def number(run: str) -> int:
    """The number at the end of a run's name, from 1; 0 for other names."""
    digits = run.rpartition("-")[2]
    return int(digits) if digits.isdecimal() else 0
