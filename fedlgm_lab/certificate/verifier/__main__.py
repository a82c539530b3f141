"""The verifier as a program that loads neither PyTorch nor Flower."""

import argparse
import sys
from pathlib import Path

from fedlgm_lab.certificate.verifier.run import run_checks

parser = argparse.ArgumentParser(prog="fedlgm_lab.certificate.verifier")
parser.add_argument("certificate", type=Path)
parser.add_argument("model", type=Path, nargs="?", help="not for the statement of a node")
parser.add_argument("--key", type=Path, help="public key of the seller, in PEM")
parser.add_argument("--releases", type=Path, help="default: releases beside the certificate")
parser.add_argument("--witness", type=Path, action="append", dest="witnesses", default=[])
parser.add_argument(
    "--accept",
    action="append",
    dest="accepts",
    default=[],
    help="unanchored, unreplayed, simulation",
)
parser.add_argument("--code", action="append", dest="codes", default=[])
parser.add_argument("--json", action="store_true", dest="as_json")

if __name__ == "__main__":
    sys.exit(run_checks(**vars(parser.parse_args())))
