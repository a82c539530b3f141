# Types of the tools for editors: the entry points in pyproject.toml name the same objects.

import typer

from fedlgm_lab.audits import Audit as Audit
from fedlgm_lab.audits.runs.canaries import RunAudit as RunAudit
from fedlgm_lab.audits.runs.targets import audit_run as audit_run
from fedlgm_lab.certificate.commitment import settled_root as settled_root
from fedlgm_lab.certificate.releases import release_log as release_log
from fedlgm_lab.recommend.recommend import recommend as recommend
from fedlgm_lab.recommend.sweep import sweep_report as sweep_report
from fedlgm_lab.recommend.sweep import sweep_table as sweep_table
from fedlgm_lab.reports.notebook import summary_html as summary_html
from fedlgm_lab.reports.report import write_report as write_report
from fedlgm_lab.studies.results import Study as Study
from fedlgm_lab.studies.statistics import difference as difference
from fedlgm_lab.studies.study import study as study
from fedlgm_lab.tune.tune import tune as tune

def add_commands(app: typer.Typer) -> None: ...
