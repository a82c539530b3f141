"""Cost of the private step and of whole private rounds on a GPU: checks first, then times.

    python -m benchmarks.gpu [--json] [--sweep] [--runs]

The benchmark needs torch, numpy and scipy. Its kernels need Triton, a C compiler and Python's
headers. `--runs` needs the whole package with transformers and peft, and FashionMNIST; pfl takes
part if it is installed. Without a GPU the benchmark runs the checks and a round on small sizes, and
says so. If Triton is installed, they run in Triton's interpreter (the interpreter of Triton 3.6
needs NumPy < 2.4). A part that fails is named under "failures" (exit status 1) and does not stop
the others; standard error shows each part's figures as soon as they are measured.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import platform
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.gpu_parts import adapters, rounds
from benchmarks.gpu_parts.checks import check_all, check_no_sync
from benchmarks.gpu_parts.tables import models
from benchmarks.gpu_parts.times import Timer, sweep, time_bounded_sum, time_cpu, time_noise
from fedlgm.aggregation import kernels
from fedlgm.noise.draws import Family

CLIENTS = (1, 32)
_WHOLE = ("simulators", "adapters", "adapters_step", "billion", "billion_step", "cohorts")


class Attempts:
    """Runs parts of the benchmark and collects their errors."""

    def __init__(self) -> None:
        self.failures: list[str] = []

    def __call__(self, part: str, run: Callable[..., Any], *arguments: Any) -> Any:
        """Return the result of `run(*arguments)`, or an empty dict if the call fails.

        The result is printed at once, in case the machine is lost.
        """
        try:
            result = run(*arguments)
            print(json.dumps({part: result}), file=sys.stderr, flush=True)
            return result
        except Exception as error:
            traceback.print_exc()
            self.failures.append(f"{part}: {error!r}")
            return {}

    def checks(self, parts: dict[str, tuple[Any, ...]]) -> dict[str, dict[str, bool]]:
        """Return the results of each part's checks; a check that fails is also listed as a failure."""
        results = {part: self(part, *call) for part, call in parts.items()}
        self.failures += [
            f"{part}: {name}"
            for part, r in results.items()
            for name, passed in r.items()
            if not passed
        ]
        return results


def without_gpu(attempt: Attempts) -> dict[str, Any]:
    os.environ["TRITON_INTERPRET"] = "1"  # set before anything imports Triton
    cpu, small = torch.device("cpu"), [7, 1030, 1, 1201, 61]
    checks: dict[str, tuple[Any, ...]] = {"torch": (check_all, cpu, "torch", small)}
    if kernels.has_triton():
        checks["triton interpreter"] = (check_all, cpu, "triton", small)
    return {
        "device": None,
        "reason": "torch finds no CUDA device: kernels were checked on the CPU, nothing was timed "
        "on a GPU",
        "checks": attempt.checks(checks | {"private round": (rounds.check, cpu, rounds.TINY)}),
        "rounds": attempt("rounds", rounds.measure, cpu, rounds.TINY),
        "cpu": attempt("cpu", time_cpu, models()["resnet18"]),
    }


def with_gpu(attempt: Attempts, run_sweep: bool, runs: bool) -> dict[str, Any]:
    device = torch.device("cuda")
    backend = kernels.backend_for(torch.empty(0, device=device))
    tables, timer = models(), Timer()
    checks = {
        backend: (check_all, device, backend, tables["cnn"]),
        f"{backend}, odd sizes": (check_all, device, backend, [7, 1030, 1, 70_001, 61]),
        f"{backend}, ResNet-18": (check_all, device, backend, tables["resnet18"]),
        "no host synchronisation": (check_no_sync,),
        "private round": (rounds.check, device, rounds.SMALL),
    }
    report = {
        "device": torch.cuda.get_device_name(),
        "backend": backend,
        "checks": attempt.checks(checks),
        "bounded_sum": list(_bounded_sums(attempt, timer)),
        "noise": [
            attempt(f"noise, {name}, {family}", time_noise, timer, name, sizes, family)
            for name, sizes in tables.items()
            for family in get_args(Family)
        ],
        "rounds": attempt("rounds", rounds.measure, device, rounds.FULL, run_sweep),
        "cpu": attempt("cpu", time_cpu, tables["resnet18"]),
    }
    if runs:
        report["simulators"] = attempt("simulators", _simulators)
        for name, scale in {"adapters": adapters.Scale(), "billion": adapters.BILLION}.items():
            report[name] = attempt(name, adapters.measure, device, scale)
            report[f"{name}_step"] = attempt(f"{name} step", adapters.measure_steps, device, scale)
        report |= _recipes(attempt)
    if run_sweep and backend == "triton":
        report["sweep"] = attempt("sweep", sweep, timer) or []
    return report


def _bounded_sums(attempt: Attempts, timer: Timer) -> Iterable[dict[str, Any]]:
    for (name, sizes), clients in itertools.product(models().items(), CLIENTS):
        needed = 4 * sum(sizes) * (3.5 * clients + 4)
        if torch.cuda.mem_get_info()[0] < needed:
            yield {"model": name, "clients": clients, "skipped": f"needs {needed / 2**30:.1f} GiB"}
            continue
        yield attempt(
            f"bounded sum, {name}, {clients} clients", time_bounded_sum, timer, name, sizes, clients
        )
        torch.cuda.empty_cache()


def _simulators() -> dict[str, Any]:
    from benchmarks.gpu_parts import simulators

    return simulators.measure()


def _recipes(attempt: Attempts) -> dict[str, Any]:
    from benchmarks.gpu_parts import recipes

    return {
        "recipes": [
            attempt(f"recipe {name}", recipes.beside_a_loop, name, 5, "cuda")
            for name in recipes.NAMES
        ],
        "cohorts": attempt("cohorts", recipes.cohorts),
    }


def version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def driver() -> str | None:
    """Return the version of the NVIDIA driver, if there is one."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        return (
            subprocess.run(command, capture_output=True, text=True, check=True)
            .stdout.split("\n")[0]
            .strip()
        )
    except (OSError, subprocess.CalledProcessError):
        return None


def show(report: dict[str, Any]) -> None:
    print(report["device"] or report["reason"])
    for part, checks in report["checks"].items():
        print(f"{part}: {sum(checks.values())} of {len(checks)} checks passed")
    parts = [report.get(part, []) for part in ("bounded_sum", "noise", "sweep")]
    rows = [*itertools.chain(*parts), *report["rounds"].get("rows", [])]
    rows += report.get("recipes", [])
    whole = [report.get(part) for part in _WHOLE]
    for row in filter(None, [*rows, report["rounds"].get("summary"), report["cpu"], *whole]):
        print(
            "  ".join(
                f"{k}={v:.4g}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()
            )
        )
    for failure in report["failures"]:
        print(f"failed: {failure}")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--sweep",
        action="store_true",
        help="also time other launch configurations, and compile every width of a round",
    )
    parser.add_argument(
        "--runs", action="store_true", help="also measure whole runs, beside a bare loop and pfl"
    )
    options = parser.parse_args()
    attempt = Attempts()
    report = (
        with_gpu(attempt, options.sweep, options.runs)
        if torch.cuda.is_available()
        else without_gpu(attempt)
    )
    report["failures"] = attempt.failures
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
    return 1 if report["failures"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
