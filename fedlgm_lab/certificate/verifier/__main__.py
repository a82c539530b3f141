"""The verifier as a program that loads neither PyTorch nor Flower."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from fedlgm_lab.certificate.verifier.run import run_checks

parser = argparse.ArgumentParser(prog="fedlgm_lab.certificate.verifier")
parser.add_argument("certificate", type=Path)
parser.add_argument("model", type=Path, nargs="?", help="not for the statement of a node")
parser.add_argument("--key", type=Path, help="public key of the seller, in PEM")
parser.add_argument("--releases", type=Path, help="default: releases beside the certificate")
parser.add_argument("--witness", type=Path, action="append", default=[])
parser.add_argument(
    "--accept", action="append", default=[], help="unanchored, unreplayed, simulation"
)
parser.add_argument("--code", action="append", default=[])
parser.add_argument("--json", action="store_true")

if __name__ == "__main__":
    given = parser.parse_args()
    status = run_checks(
        given.certificate,
        given.model,
        key=given.key,
        releases=given.releases,
        witnesses=given.witness,
        accepts=given.accept,
        codes=given.code,
        as_json=given.json,
    )
    sys.exit(status)
