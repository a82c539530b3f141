"""`fedlgm certify`, `fedlgm anchor` and `fedlgm verify`, whose functions make slow imports."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from simulations.shell import JsonOption, RunArgument, console

_KeyOption = Annotated[Path, typer.Option("--key", help="Private key in PEM (Ed25519).")]
_NewKeyOption = Annotated[
    bool, typer.Option("--new-key", help="First make the key, and write its public key beside it.")
]


def certify(
    run: RunArgument,
    key: _KeyOption,
    out: Annotated[
        Path | None, typer.Option(help="File to write; default: certificate.json in the run.")
    ] = None,
    anchors: Annotated[
        list[Path] | None,
        typer.Option("--anchor", help="File of a witness's anchors; repeatable."),
    ] = None,
    new_key: _NewKeyOption = False,
) -> None:
    """Issue a certificate of a finished run. Anybody can check the certificate."""
    from fedlgm_lab.certificate import signing
    from fedlgm_lab.certificate.certify import certify as issue

    if new_key:
        signing.create_key(key)
    signed = [anchor for path in anchors or () for anchor in signing.read_anchors(path)]
    target = issue(run, key, out, signed)
    console.print(f"wrote {target} and {run / 'model.safetensors'}", soft_wrap=True)


def anchor(
    head: Annotated[str, typer.Argument(help="ROUND:HEAD, or commitment:HASH for a beacon.")],
    key: _KeyOption,
    out: Annotated[
        Path | None, typer.Option(help="File to add the anchor or beacon to; default: print.")
    ] = None,
    new_key: _NewKeyOption = False,
) -> None:
    """Sign a head of another party's run as a witness, or answer the run's commitment with a
    beacon.
    """
    from fedlgm_lab.certificate import signing

    if new_key:
        signing.create_key(key)
    line = json.dumps(signing.sign_head(head, signing.load_key(key))) + "\n"
    if out is None:
        sys.stdout.write(line)
    else:
        with out.open("a", encoding="utf-8") as file:
            file.write(line)


def verify(
    certificate: Annotated[Path, typer.Argument(help="Certificate.")],
    model: Annotated[
        Path | None,
        typer.Argument(help="Model file (safetensors); none for the statement of a node."),
    ] = None,
    key: Annotated[
        Path | None, typer.Option("--key", help="Public key of the seller, in PEM.")
    ] = None,
    releases: Annotated[
        Path | None,
        typer.Option(help="Folder of the released vectors; default: beside the certificate."),
    ] = None,
    opened: Annotated[
        Path | None,
        typer.Option("--open", help="Level 2: private folder of the run, for an auditor."),
    ] = None,
    witnesses: Annotated[
        list[Path] | None,
        typer.Option("--witness", help="Public key of a witness or auditor; repeatable."),
    ] = None,
    accepts: Annotated[
        list[str] | None,
        typer.Option("--accept", help="unanchored, unreplayed or simulation; repeatable."),
    ] = None,
    codes: Annotated[
        list[str] | None,
        typer.Option("--code", help="SHA-256 of code that you trust; repeatable."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Check a certificate. Exit status: 0 if it holds, 2 if it does not, 3 if it cannot be
    checked.
    """
    from fedlgm_lab.certificate.verifier.run import run_checks

    status = run_checks(
        certificate,
        model,
        key=key,
        releases=releases,
        opened=opened,
        witnesses=witnesses or (),
        accepts=accepts or (),
        codes=codes or (),
        as_json=as_json,
    )
    raise typer.Exit(status)
