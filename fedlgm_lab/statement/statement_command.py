"""The `fedlgm statement` command. Slow imports are made inside the functions."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from simulations.shell import RunArgument

_FORMATS = ("md", "html", "json", "registry")


def statement(
    run: RunArgument,
    format: Annotated[
        str,
        typer.Option(
            help="md (for a model card), html, json, or registry (a row for the Differential "
            "Privacy Deployments Registry)."
        ),
    ] = "md",
    out: Annotated[
        Path | None, typer.Option(help="File to write; by default the text is printed.")
    ] = None,
    private: Annotated[
        bool, typer.Option("--private", help="Include the audit, which is for the operator.")
    ] = False,
) -> None:
    """Write the privacy statement of a finished run: what is protected, how strongly, and on which
    assumptions.
    """
    from fedlgm.checks import check_known
    from fedlgm.files import PRIVATE, PUBLIC, path_of, write_durably

    check_known("--format", format, _FORMATS)
    text = write(run, format, private=private)
    if out is None:
        print(text, end="")
        return
    write_durably(path_of("--out", out), text.encode(), PRIVATE if private else PUBLIC)


def write(run: Path, format: str, *, private: bool = False) -> str:
    """Format a finished run's statement.

    Args:
        run: the run's folder.
        format: "md", "html", "json" or "registry".
        private: whether to include the audit.

    Raises:
        RunError: the folder is not a run's, or the run is not finished.
        LedgerError: the ledger is damaged, or does not match the recipe, the checkpoints and the
            result.
    """
    from fedlgm_lab.statement import statement_page
    from fedlgm_lab.statement.questions import answer_questions, registry_row
    from simulations.runs import strict_json
    from simulations.runs.folder import RunFolder

    folder = RunFolder.open(run)
    result = folder.verified_result()
    told: dict[str, Any] = {**result["statement"]}
    if told["searched"] == "not declared" and (study := _study_of(folder.path)):
        told["searched"] = f"a run of the study {study}, whose other runs are not charged here"
    if private:
        told |= _audit_of(folder.audit_summary())
    if format == "json":
        return f"{strict_json.dumps(told, indent=2)}\n"
    if format == "registry":
        return f"{strict_json.dumps(registry_row(told, result['recipe']), indent=2)}\n"
    title = f"Privacy statement: {result['recipe']}"
    make = statement_page.to_html if format == "html" else statement_page.to_markdown
    return make(title, answer_questions(told))


def _study_of(run: Path) -> str | None:
    """Find the name of the study to which a run belongs; None if it belongs to no study."""
    return next(
        (folder.name for folder in run.absolute().parents[:3] if (folder / "study.json").is_file()),
        None,
    )


def _audit_of(summary: Any) -> dict[str, Any]:
    if "audited_epsilon" not in summary:
        return {}
    how = f"{summary['audit_method']}, confidence {summary['audit_confidence']:g}"
    return {"audited_epsilon": summary["audited_epsilon"], "audit": how}
