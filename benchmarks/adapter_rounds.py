"""Private LoRA rounds of a model of the shape of GPT-2 small, compared with a bare loop on one
core: `python -m benchmarks.adapter_rounds [--write]`.

See `benchmarks.gpu_parts.adapters`, which measures the same rounds on a GPU. `--write` writes the
figures to docs/results/adapter-rounds.json.
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import torch

from benchmarks.gpu_parts.adapters import Scale, measure

KEPT = Path(__file__).parents[1] / "docs" / "results" / "adapter-rounds.json"
SCALE = Scale(clients=20, cohort=4, rounds=6)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {KEPT.name}")
    options = parser.parse_args()
    torch.set_num_threads(1)
    figures = measure(torch.device("cpu"), SCALE)
    figures["peak_mb"] = round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
    text = json.dumps(figures, indent=1)
    print(text)
    if options.write:
        KEPT.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
