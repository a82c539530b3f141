"""Former names of modules, which work for one more release, and short public names of modules,
which remain valid.

Importing a former name yields the module itself, with a DeprecationWarning that states the new
name.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from collections.abc import Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import CodeType, ModuleType

from typing_extensions import override

SHORT = frozenset(
    {
        "fedlgm.allocation",
        "fedlgm.correlation",
        "fedlgm.example_level",
        "fedlgm.keys",
        "fedlgm.layers",
        "fedlgm.models",
        "fedlgm.queries",
        "fedlgm.release",
        "fedlgm.tasks",
        "fedlgm.testing",
    }
)
"""Short public names of modules that also have a longer name. Importing them gives no warning."""

_MOVED = {
    "clients.node": "fedlgm_nodes.service",
    "clients.node.policy": "fedlgm_nodes.policy",
    "clients.node.template": "fedlgm_nodes.policy_template",
    "fedlgm.allocation": "fedlgm.planning.allocation",
    "fedlgm.attacks": "fedlgm_lab.attacks",
    "fedlgm.audits": "fedlgm_lab.audits",
    "fedlgm.client_release": "fedlgm.aggregation.client_release",
    "fedlgm.clipping": "fedlgm.planning.clipping",
    "fedlgm.contributions": "fedlgm.aggregation.contributions",
    "fedlgm.correlation": "fedlgm.noise.correlation",
    "fedlgm.devices": "fedlgm.training.devices",
    "fedlgm.example_level": "fedlgm.training.example_level",
    "fedlgm.example_level.risk": "fedlgm_lab.risk.exposure",
    "fedlgm.example_level.rules.base": "fedlgm.training.example_level.rules.rule",
    "fedlgm.facts": "fedlgm.planning.facts",
    "fedlgm.frames": "fedlgm_nodes.protocol.frames",
    "fedlgm.inputs": "fedlgm.training.inputs",
    "fedlgm.integer": "fedlgm.noise.integer",
    "fedlgm.integer_noise": "fedlgm.noise.integer_noise",
    "fedlgm.keys": "fedlgm.noise.keys",
    "fedlgm.layers": "fedlgm.planning.layers",
    "fedlgm.layout": "fedlgm.planning.layout",
    "fedlgm.mechanisms.base": "fedlgm.mechanisms.mechanism",
    "fedlgm.models": "fedlgm.training.models",
    "fedlgm.node_protocol": "fedlgm_nodes.protocol.messages",
    "fedlgm.noised_by": "fedlgm.planning.trust",
    "fedlgm.noised_in_shares": "fedlgm.planning.distributed_trust",
    "fedlgm.papers.inid.coordinate_descent": "fedlgm_lab.applications.coordinate_descent",
    "fedlgm.papers.inid.datasets": "fedlgm_lab.applications.datasets",
    "fedlgm.papers.inid.federated_descent": "fedlgm_lab.applications.federated_descent",
    "fedlgm.papers.inid.federated_pca": "fedlgm_lab.applications.federated_pca",
    "fedlgm.papers.inid.objectives": "fedlgm_lab.applications.objectives",
    "fedlgm.papers.inid.pca": "fedlgm_lab.applications.pca",
    "fedlgm.papers.inid.smoothness": "fedlgm_lab.applications.smoothness",
    "fedlgm.papers.inid.sums": "fedlgm_lab.applications.sums",
    "fedlgm.plan": "fedlgm.planning.plan",
    "fedlgm.process": "fedlgm.planning.charging",
    "fedlgm.queries": "fedlgm.planning.queries",
    "fedlgm.registration": "fedlgm.extension.registration",
    "fedlgm.release": "fedlgm.noise.release",
    "fedlgm.remembered": "fedlgm.cache",
    "fedlgm.rows_apart": "fedlgm.extension.per_row",
    "fedlgm.run_noise": "fedlgm.noise.run_noise",
    "fedlgm.run_rules": "fedlgm.planning.run_rules",
    "fedlgm.secagg": "fedlgm_nodes.secagg",
    "fedlgm.separation": "fedlgm.extension.separation",
    "fedlgm.shadowed": "fedlgm.package_conflicts",
    "fedlgm.tasks": "fedlgm.training.tasks",
    "fedlgm.tasks.base": "fedlgm.training.tasks.task",
    "fedlgm.testing": "fedlgm.extension.testing",
    "fedlgm.transcript": "fedlgm.planning.transcript",
    "fedlgm.trial": "fedlgm.extension.trial",
    "fedlgm.upload_caps": "fedlgm.planning.upload_caps",
    "fedlgm.water_filling": "fedlgm.planning.filling",
    "simulations.advice": "fedlgm_lab.recommend",
    "simulations.advice.command": "fedlgm_lab.recommend.recommend_command",
    "simulations.advice.rows": "fedlgm_lab.recommend.score_rows",
    "simulations.advice.work": "fedlgm_lab.recommend.model_work",
    "simulations.applications": "fedlgm_lab.applications",
    "simulations.applications.command": "fedlgm_lab.applications.apply_command",
    "simulations.attacks": "fedlgm_lab.attacks.runs",
    "simulations.attacks.command": "fedlgm_lab.attacks.runs.attack_command",
    "simulations.attacks.figures": "fedlgm_lab.attacks.runs.attack_figures",
    "simulations.audits": "fedlgm_lab.audits.runs",
    "simulations.audits.command": "fedlgm_lab.audits.runs.audit_command",
    "simulations.audits.figures": "fedlgm_lab.audits.runs.audit_figures",
    "simulations.deploy": "fedlgm_nodes.deploy",
    "simulations.reports": "fedlgm_lab.reports",
    "simulations.reports.adapter_files": "simulations.exports.adapter_files",
    "simulations.reports.bare_ledger": "simulations.summaries.bare_ledger",
    "simulations.reports.charges": "simulations.summaries.charges",
    "simulations.reports.doctor": "simulations.summaries.doctor",
    "simulations.reports.export": "simulations.exports.export",
    "simulations.reports.planning": "simulations.summaries.planning",
    "simulations.reports.predict": "simulations.exports.predict",
    "simulations.reports.rounds": "simulations.summaries.rounds",
    "simulations.reports.rows": "simulations.summaries.report_types",
    "simulations.reports.sweep": "fedlgm_lab.recommend.sweep",
    "simulations.reports.terminal": "simulations.summaries.terminal",
    "simulations.risk": "fedlgm_lab.risk",
    "simulations.risk.command": "fedlgm_lab.risk.risk_command",
    "simulations.risk.figures": "fedlgm_lab.risk.risk_figures",
    "simulations.studies": "fedlgm_lab.studies",
    "simulations.studies.command": "fedlgm_lab.studies.study_command",
    "simulations.studies.rows": "fedlgm_lab.studies.study_rows",
    "simulations.tuning": "fedlgm_lab.tune",
    "simulations.tuning.command": "fedlgm_lab.tune.tune_command",
    "simulations.tuning.rows": "fedlgm_lab.tune.search_result",
    "strategies.node": "fedlgm_nodes.server",
}


def new_name(name: str) -> str | None:
    """Return the present name for a former or short name of a module; None for any other name.

    >>> new_name("fedlgm.example_level.engine"), new_name("fedlgm.errors")
    ('fedlgm.training.example_level.engine', None)
    """
    parts = name.split(".")
    for length in range(len(parts), 1, -1):
        moved = _MOVED.get(".".join(parts[:length]))
        if moved is not None:
            return ".".join([moved, *parts[length:]])
    return None


class _Former(MetaPathFinder, InspectLoader):
    """Finds and loads the modules of `_MOVED`."""

    def __init__(self) -> None:
        self._specs: dict[str, ModuleSpec | None] = {}

    @override
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        name = new_name(fullname)
        spec = importlib.util.find_spec(name) if name is not None else None
        if spec is None:
            return None
        is_package = spec.submodule_search_locations is not None
        return ModuleSpec(fullname, self, origin=spec.origin, is_package=is_package)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module under its present name, and warn if the former name is deprecated."""
        name = new_name(spec.name) or ""
        if ".".join(spec.name.split(".")[:2]) not in SHORT:
            warnings.warn(f"{spec.name} is now {name}", DeprecationWarning, stacklevel=2)
        module = importlib.import_module(name)
        self._specs[spec.name] = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        """Run nothing, because the module has run under its present name; restore the specification
        of this name.
        """
        name = module.__spec__.name if module.__spec__ is not None else ""
        module.__spec__ = self._specs.pop(name, module.__spec__)

    def get_code(self, fullname: str) -> CodeType | None:
        """Return the code of the module, for `python -m`."""
        name = new_name(fullname) or ""
        spec = importlib.util.find_spec(name)
        return (
            spec.loader.get_code(name)
            if spec is not None and isinstance(spec.loader, InspectLoader)
            else None
        )

    def get_source(self, fullname: str) -> str | None:
        """Return None, because sources are read under the module's present name."""
        return None


def install() -> None:
    """Let Python find modules under their former names.

    This finder comes first. Otherwise Python would find the files of a package's modules under the
    package's former name, and load them a second time.
    """
    if not any(isinstance(finder, _Former) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Former())
