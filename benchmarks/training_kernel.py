"""The compiled kernel compared with PyTorch, model by model:
`python -m benchmarks.training_kernel [--avx2] [--write]`.

Both train the same client in one process on one thread and take turns; a ratio is PyTorch's
processor time divided by the kernel's in the same turn. `--avx2` restricts the kernel and all of
PyTorch's libraries to AVX2.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

from fedlgm.planning.layers import LayerTable
from fedlgm.training import (
    ClientTask,
    LocalTraining,
    NativeTrainer,
    SequentialTrainer,
    Trainer,
    models,
)
from fedlgm.training.native import instruction_set

PLACE = Path("docs/results/training-kernel.json")
AVX2 = {
    "ATEN_CPU_CAPABILITY": "avx2",
    "ONEDNN_MAX_CPU_ISA": "AVX2",
    "MKL_ENABLE_INSTRUCTIONS": "AVX2",
}
MODELS: list[tuple[str, tuple[int, ...], int, dict[str, Any]]] = [
    ("cnn", (1, 28, 28), 120, {"activation": "sigmoid"}),
    ("s-cnn", (1, 28, 28), 32, {}),
    ("cnn-small", (3, 32, 32), 50, {}),
    ("d-cnn", (3, 32, 32), 32, {}),
    ("cifar-cnn", (3, 32, 32), 32, {}),
    ("mlp", (1, 8, 8), 3, {"hidden": [32], "activation": "tanh"}),
    ("mlp", (1, 28, 28), 120, {"hidden": [256]}),
]


def measure(
    name: str, shape: tuple[int, ...], examples: int, options: dict[str, Any], turns: int
) -> dict[str, Any]:
    """Measure one model: two epochs of one client in batches of 32, several times for a small
    model.
    """
    settings, repeats = (
        LocalTraining(lr=0.01, batch_size=32),
        max(1, 200 // examples) if name == "mlp" else 1,
    )
    made = [models.build(name, in_shape=shape, classes=10, **options) for _ in range(2)]
    layers = LayerTable.from_module(made[0])
    start = layers.flatten(made[0]).clone()
    x, y = torch.randn(examples, *shape), torch.randint(10, (examples,))
    trainers: dict[str, Trainer] = {
        "torch": SequentialTrainer(made[0], layers, settings),
        "kernel": NativeTrainer(made[1], layers, settings),
    }
    spent: dict[str, list[float]] = {side: [] for side in trainers}
    for turn in range(turns + 1):
        for side, trainer in trainers.items():
            started = time.process_time()
            for _ in range(repeats):
                for _update in trainer.updates(start, [ClientTask(x, y, torch.Generator(), 2)]):
                    pass
            if turn:  # the first warms up
                spent[side].append(time.process_time() - started)
    ratios = sorted(b / a for a, b in zip(spent["kernel"], spent["torch"], strict=True))
    figures = {
        "ratio": statistics.median(ratios),
        "least": ratios[0],
        "most": ratios[-1],
        "seconds": spent,
    }
    return {"model": name, "shape": list(shape), "examples": examples, "options": options} | figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--avx2", action="store_true", help="without AVX-512")
    parser.add_argument("--turns", type=int, default=7, help="measured turns of each")
    parser.add_argument("--write", action="store_true", help=f"keep the figures in {PLACE}")
    arguments = parser.parse_args()
    if (
        arguments.avx2 and os.environ.get("ONEDNN_MAX_CPU_ISA") != "AVX2"
    ):  # libraries read it when they are loaded
        os.execve(
            sys.executable,
            [sys.executable, "-m", "benchmarks.training_kernel", *sys.argv[1:]],
            os.environ | AVX2,
        )
    torch.set_num_threads(1)
    rows = []
    for name, shape, examples, options in MODELS:
        rows.append(measure(name, shape, examples, options, arguments.turns))
        print(f"{name} {shape}: {rows[-1]['ratio']:.2f}", file=sys.stderr, flush=True)
    found = {"torch": torch.__version__, "turns": arguments.turns, "rows": rows}
    if arguments.write:
        kept = json.loads(PLACE.read_text(encoding="utf-8"))
        kept[str(instruction_set())] = found
        PLACE.write_text(json.dumps(kept) + "\n", encoding="utf-8")
    print(json.dumps({str(instruction_set()): found}))


if __name__ == "__main__":
    main()
