"""What the private step and whole private rounds cost on a GPU: checks first, then times.

    python -m benchmarks.gpu [--json] [--sweep]

Needs torch, numpy and scipy; Triton for its kernels. Without a GPU it runs the checks and a round on small sizes (in
Triton's interpreter, if Triton is installed) and says so.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_parts import rounds
from benchmarks.gpu_parts.checks import check_all, check_no_sync
from benchmarks.gpu_parts.tables import models
from benchmarks.gpu_parts.times import Timer, sweep, time_cpu, time_noise, time_private_step
from fedlgm import kernels
from fedlgm.noise import Family

CLIENTS = (1, 32)


def without_gpu() -> dict[str, Any]:
    os.environ["TRITON_INTERPRET"] = "1"  # before anything imports Triton
    small = [7, 1030, 1, 1201, 61]
    checks = {"torch": check_all(torch.device("cpu"), "torch", small)}
    if kernels.has_triton():
        checks["triton interpreter"] = check_all(torch.device("cpu"), "triton", small)
    return {
        "device": None,
        "reason": "torch finds no CUDA device: kernels were checked on the CPU, nothing was timed on a GPU",
        "checks": checks | {"private round": rounds.check(torch.device("cpu"), rounds.TINY)},
        "rounds": rounds.measure(torch.device("cpu"), rounds.TINY),
        "cpu": time_cpu(models()["resnet18"]),
    }


def with_gpu(run_sweep: bool) -> dict[str, Any]:
    device = torch.device("cuda")
    backend = kernels.backend_for(torch.empty(0, device=device))
    tables = models()
    checks = {
        backend: check_all(device, backend, tables["cnn"]),
        f"{backend}, odd sizes": check_all(device, backend, [7, 1030, 1, 70_001, 61]),
        f"{backend}, ResNet-18": check_all(device, backend, tables["resnet18"]),
        "no host synchronisation": check_no_sync(),
        "private round": rounds.check(device, rounds.SMALL),
    }
    timer = Timer()
    steps = []
    for name, sizes in tables.items():
        for clients in CLIENTS:
            needed = 4 * sum(sizes) * (3.5 * clients + 4)
            if torch.cuda.mem_get_info()[0] < needed:
                steps.append({"model": name, "clients": clients, "skipped": f"needs {needed / 2**30:.1f} GiB"})
                continue
            steps += [time_private_step(timer, name, sizes, clients, local) for local in (False, True)]
            torch.cuda.empty_cache()
    report = {
        "device": torch.cuda.get_device_name(),
        "backend": backend,
        "checks": checks,
        "private_step": steps,
        "noise": [time_noise(timer, name, s, f) for name, s in tables.items() for f in get_args(Family)],
        "rounds": rounds.measure(device, rounds.FULL, compile_all=run_sweep),
        "cpu": time_cpu(tables["resnet18"]),
    }
    return report | ({"sweep": sweep(timer)} if run_sweep and backend == "triton" else {})


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Version of the NVIDIA driver, if there is one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()
    except (OSError, subprocess.CalledProcessError):
        return None


def show(report: dict[str, Any]) -> None:
    print(report["device"] or report["reason"])
    for part, checks in report["checks"].items():
        failed = [name for name, passed in checks.items() if not passed]
        print(f"{part}: {len(checks)} checks, failed: {failed or 'none'}")
    for row in (
        report.get("private_step", [])
        + report.get("noise", [])
        + report.get("sweep", [])
        + [
            *report["rounds"]["rows"],
            report["rounds"]["summary"],
            report["cpu"],
        ]
    ):
        print("  ".join(f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sweep", action="store_true", help="also time other launch configurations, and compile every width of a round"
    )
    options = parser.parse_args()
    report = with_gpu(options.sweep) if torch.cuda.is_available() else without_gpu()
    report["versions"] = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version("triton"),
        "cuda": torch.version.cuda,
        "driver": driver(),
    }
    report["date"] = time.strftime("%Y-%m-%d")
    if options.json:
        print(json.dumps(report, indent=2))
    else:
        show(report)
    return 0 if all(passed for checks in report["checks"].values() for passed in checks.values()) else 1


if __name__ == "__main__":
    raise SystemExit(main())
