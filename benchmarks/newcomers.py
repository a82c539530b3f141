"""The first private result of seven newcomers: `python -m benchmarks.newcomers [--write]`.

Each newcomer starts with an empty folder, an installed environment and a page of the documentation.
Commands and code are read from that page. The lines that the newcomer writes are counted, without
copied lines. The measured time ends with the command that prints the first epsilon.
"""

from __future__ import annotations

import argparse
import difflib
import json
import os
import platform
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from simulations.engines.flower_processes import end, free_ports, started_under

ROOT = Path(__file__).parents[1]
PLACE = Path("docs/results/newcomers.json")
MOST_LINES, MOST_SECONDS = 10, 120.0
LIMIT_S = 600.0
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@dataclass
class Visit:
    """The commands of one newcomer in a folder, with their time and the lines that the newcomer
    writes.

    Attributes:
        folder: where the newcomer works.
        home: folder of caches and of Flower's files, empty at the start.
        page: the page in the repository on which the newcomer begins.
        commands: commands so far.
        lines: lines that the newcomer has written.
        seconds: time of the commands so far.
        first: (seconds, commands, epsilon) at the first private result.
    """

    folder: Path
    home: Path
    page: str = ""
    commands: int = 0
    lines: int = 0
    seconds: float = 0.0
    first: tuple[float, int, float] | None = None
    environment: dict[str, str] = field(default_factory=dict)

    def read(self, page: str) -> str:
        """Open the page on which the newcomer begins."""
        self.page = page
        return (ROOT / page).read_text(encoding="utf-8")

    def paste(self, file: str, code: str, changes: Mapping[str, str] | None = None) -> None:
        """Copy code from a page into a file, and change some of the lines."""
        (self.folder / file).write_text(code, encoding="utf-8")
        self.change(file, changes or {})

    def change(self, file: str, changes: Mapping[str, str]) -> None:
        """Change a file."""
        before = after = (self.folder / file).read_text(encoding="utf-8")
        for old, new in changes.items():
            assert after.count(old) == 1, (file, old)
            after = after.replace(old, new)
        self.replace(file, before, after)

    def replace(self, file: str, before: str, after: str) -> None:
        """Write a file, and count its new lines as written by the newcomer."""
        differences = difflib.ndiff(before.splitlines(), after.splitlines())
        self.lines += sum(line.startswith("+ ") and line.strip() != "+" for line in differences)
        (self.folder / file).write_text(after, encoding="utf-8")

    def run(self, command: str, shows: str = "") -> None:
        """Run a command as typed; the pattern `shows` finds epsilon in its output."""
        self.commands += 1
        if exported := re.fullmatch(r"export (\w+)=(\w+)", command):
            self.environment[exported[1]] = exported[2]
            return
        paths = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
        variables = {
            "PATH": paths,
            "PYTHONPATH": str(ROOT),
            "FEDLGM_CACHE": str(self.home / "cache"),
            "FLWR_HOME": str(self.home / "flwr"),
        }
        started = time.perf_counter()
        done = subprocess.run(
            ["bash", "-c", command],
            cwd=self.folder,
            env=os.environ | variables | self.environment,
            capture_output=True,
            text=True,
            timeout=LIMIT_S,
        )
        self.seconds += time.perf_counter() - started
        assert done.returncode == 0, (command, done.stdout[-2000:], done.stderr[-4000:])
        if shows:
            found = re.search(shows, done.stdout)
            assert found, (command, shows, done.stdout[-2000:])
            self.first = self.first or (self.seconds, self.commands, float(found[1]))


def code_of(page: str, number: int = 0) -> str:
    """Return the Python block number `number` of a page."""
    return [code for kind, code in _BLOCK.findall(page) if kind == "python"][number]


def command_of(page: str, start: str) -> str:
    """Find a page's command that begins with `start`, in a block, an indented line or the text."""
    blocks = [code for kind, code in _BLOCK.findall(page) if kind in ("", "console")]
    lines = re.findall(r"^    (\S.*(?:\\\n.*)*)$", page, re.MULTILINE)
    for block in blocks:
        lines += block.replace("\\\n", "").splitlines()
    lines += re.findall(r"`([^`\n]+)`", page)
    found = {re.sub(r"\s+#.*| {2,}", " ", line).strip() for line in lines if line.startswith(start)}
    assert len(found) == 1, (start, found)
    return found.pop()


def dp_researcher(visit: Visit) -> None:
    """Compare a user's allocation rule with SNR-consistent noise."""
    page = visit.read("docs/start/paper.md")
    rule = {
        "class EqualNoise(Mechanism):": "class BySize(Mechanism):",
        "clip = np.full(len(layers), self.bound / len(layers) ** 0.5)": (
            "clip = self.bound * np.sqrt(layers.sizes / layers.sizes.sum())"
        ),
        """EqualNoise("the paper's")""": 'BySize("mine")',
    }
    visit.paste("rule.py", code_of(page), rule)
    visit.run("python rule.py", shows=r"\nepsilon +([\d.]+) ")


def hospital_statistician(visit: Visit) -> None:
    """Start with one table for each of six clinics and a public table; a column holds the outcome."""
    from sklearn.datasets import load_diabetes

    frame = load_diabetes(as_frame=True, scaled=False).frame
    frame["progressed"] = (frame.pop("target") > 140).astype(int)
    frame[::5].to_csv(visit.folder / "public.csv", index=False)
    private = frame.drop(frame.index[::5])
    (visit.folder / "clinics").mkdir()
    for i in range(6):
        private[i::6].to_csv(visit.folder / f"clinics/{i}.csv", index=False)
    page = visit.read("docs/start/hospitals.md")
    own = {
        '{"train": "sites/*.csv", "test": "test.csv", "target": "benign"}': (
            '{"train": "clinics/*.csv", "test": "public.csv", "target": "progressed"}'
        )
    }
    visit.paste("train.py", code_of(page, 1), own)
    visit.run("python train.py", shows=r"[\d.]+ [\d.]+ [\d.]+ ([\d.]+) ")


def flower_user(visit: Visit) -> None:
    """Start with a Flower app, and change it as the page's differences show."""
    page = visit.read("docs/start/flower.md")
    for file in (ROOT / "docs/examples/existing_flower_app").glob("*.*"):
        shutil.copy(file, visit.folder)
    private = (visit.folder / "app.py").read_text(encoding="utf-8")
    removed = [
        line[1:]
        for kind, block in _BLOCK.findall(page)
        for line in block.splitlines()
        if kind == "diff" and line.startswith("-")
    ]
    client_import, client, server_import, strategy = removed
    plain = private
    for line, beginning in (
        (client_import, "from clients import"),
        (client.replace("app = ", "client = "), "client = "),
        (server_import, "from strategies import"),
        (f"    {strategy}", "    strategy = "),
    ):
        plain, count = re.subn(rf"^{beginning}.*$", line, plain, flags=re.MULTILINE)
        assert count == 1, beginning
    visit.replace("app.py", plain, private)
    superlink, control = map(str, free_ports(2))  # this machine's may be taken
    visit.environment |= {
        "FLWR_LOCAL_SUPERLINK_HTTP_API_PORT": superlink,
        "FLWR_LOCAL_CONTROL_API_PORT": control,
    }
    try:
        for start in ("mkdir", "export", "flwr run docs"):
            command = command_of(page, start).replace("/tmp/private", str(visit.home / "private"))
            command = command.replace("docs/examples/existing_flower_app", ".")
            visit.run(command, shows="" if start == "mkdir" else r"fedlgm: epsilon ([\d.]+) at")
    finally:
        home = visit.home / "flwr"
        end(started_under(home), more=lambda: started_under(home))


def phd_student(visit: Visit) -> None:
    """Start with a folder that holds a fine-tuned BERT and its tokenizer, and with reviews in two
    tables.
    """
    import numpy as np
    import pandas as pd
    from transformers import BertConfig, BertForSequenceClassification, BertTokenizer

    words = ["bad", "dull", "fine", "good", "great", "plot", "cast", "film"]
    vocabulary = visit.home / "vocab.txt"
    vocabulary.write_text("\n".join(["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *words]))
    BertTokenizer(str(vocabulary)).save_pretrained(visit.folder / "my-bert")
    sizes = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=13, intermediate_size=32, **sizes)  # two classes by default
    BertForSequenceClassification(config).save_pretrained(visit.folder / "my-bert")
    random = np.random.default_rng(0)
    texts = [" ".join(random.choice(words, size=6)) for _ in range(500)]
    rows = {"review": texts, "label": [int("good" in text) for text in texts]}
    table = pd.DataFrame(rows | {"author": [f"author {i % 50}" for i in range(500)]})
    table[:400].to_csv(visit.folder / "train.csv", index=False)
    table[400:].to_csv(visit.folder / "test.csv", index=False)

    page = visit.read("docs/start/hugging-face.md")
    code = code_of(page)
    made, simulate = code.index("model = Bert"), code.index("result = ")
    own = {
        "import datasets\nimport numpy as np\n": "import pandas as pd\n",
        "from transformers import BertConfig, BertForSequenceClassification": (
            "from transformers import AutoTokenizer, BertForSequenceClassification"
        ),
        code[made:simulate]: (
            'model = BertForSequenceClassification.from_pretrained("my-bert")\n'
            'tokenizer = AutoTokenizer.from_pretrained("my-bert")\n'
            'parts = {"train": pd.read_csv("train.csv"), "test": pd.read_csv("test.csv")}\n'
        ),
        '    data=reviews.train_test_split(test_size=0.2, seed=0),\n    users="author",\n': (
            '    data={**parts, "text": "review", "tokenizer": tokenizer, "users": "author"},\n'
        ),
    }
    visit.paste("tune.py", code, own)
    visit.run("python tune.py", shows=r"before, now [\d.]+ ([\d.]+) ")


def opacus_user(visit: Visit) -> None:
    """Start with a script, and change it to the form of the page's script."""
    page = visit.read("docs/start/opacus.md")
    before, after = (
        (ROOT / f"tests/opacus_scripts/digits_cnn{suffix}.py").read_text(encoding="utf-8")
        for suffix in ("", "_fedlgm")
    )
    for line in re.findall(r"^from fedlgm.*$", after, re.MULTILINE):
        assert line in code_of(page), line
    visit.replace("digits_cnn.py", before, after)
    visit.run("python digits_cnn.py", shows=r"epsilon ([\d.]+) at")


def mac_reader(visit: Visit) -> None:
    """Follow the README as on a Mac: with the engine Ray instead of forked workers, and without the
    compiled kernel.

    The machine is not a Mac. `tests/simulations/engines/test_processes.py` shows that Ray is picked
    there. A Mac has no kernel because its processor has no AVX2. Here the kernel is missing because
    there is no compiler.
    """
    page = visit.read("README.md")
    visit.environment |= {"CXX": "false", "RAY_USAGE_STATS_ENABLED": "0"}
    assert command_of(page, "make demo")
    demo = re.search(
        r"^demo: venv\n\t\$\(BIN\)/(.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE
    )
    assert demo
    visit.run(f"{demo[1]} --engine ray", shows=r"epsilon proven\s+([\d.]+)")
    visit.paste("own.py", code_of(page))
    visit.run("python own.py", shows=r"^[\d.]+ ([\d.]+) ")


def new_project(visit: Visit) -> None:
    """Write a project with `fedlgm new`, and put the newcomer's network and arrays into it."""
    import numpy as np
    from sklearn.datasets import make_classification

    x, y = make_classification(2000, 20, n_informative=10, n_classes=4, random_state=0)
    np.savez(visit.folder / "own.npz", x=x, y=y)
    page = visit.read("README.md")
    visit.run(command_of(page, "fedlgm new").replace("DIR", "project"))
    visit.folder /= "project"
    own = {
        "import torch\nfrom sklearn.datasets import load_digits\n": (
            "import numpy as np\nimport torch\n"
        ),
        "    x, y = load_digits(return_X_y=True)": '    x, y = np.load("../own.npz").values()',
        '"train": (x[:1400] / 16, y[:1400]), "test": (x[1400:] / 16, y[1400:])': (
            '"train": (x[:1500], y[:1500]), "test": (x[1500:], y[1500:])'
        ),
        "torch.nn.Linear(64, 32), torch.nn.Tanh(), torch.nn.Linear(32, 10)": (
            "torch.nn.Linear(20, 16), torch.nn.Tanh(), torch.nn.Linear(16, 4)"
        ),
    }
    visit.change("train.py", own)
    readme = (visit.folder / "README.md").read_text(encoding="utf-8")
    visit.run(command_of(readme, "python train.py"), shows=r"epsilon ([\d.]+):")
    visit.run(command_of(readme, "fedlgm report"))


NEWCOMERS: dict[str, Callable[[Visit], None]] = {
    "DP researcher": dp_researcher,
    "hospital statistician": hospital_statistician,
    "Flower user": flower_user,
    "PhD student with a Hugging Face model": phd_student,
    "Opacus user": opacus_user,
    "reader of the README with what a Mac has": mac_reader,
    "user of `fedlgm new`": new_project,
}


def visit(who: str) -> Visit:
    """Let one newcomer go from an empty folder to a private result."""
    with tempfile.TemporaryDirectory(prefix="fedlgm-newcomer-") as folder:
        found = Visit(Path(folder) / "work", Path(folder) / "home")
        found.folder.mkdir()
        found.home.mkdir()
        NEWCOMERS[who](found)
    return found


def table(kept: dict[str, Any]) -> str:
    """Return the table for the page."""
    lines = [
        "| newcomer | begins on | commands | own lines | minutes |",
        "| --- | --- | --- | --- | --- |",
    ]
    for who, row in kept["newcomers"].items():
        page, minutes = Path(row["page"]), [seconds / 60 for seconds in row["seconds"]]
        link = page.stem  # the site does not hold the README
        if page.parts[0] == "docs":
            link = f"[{page.stem}](../{page.relative_to('docs')})"
        times = f"{statistics.median(minutes):.1f} ({min(minutes):.1f} to {max(minutes):.1f})"
        lines.append(f"| {who} | {link} | {row['commands']} | {row['lines']} | {times} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Let every newcomer begin several times, in turn."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--write", action="store_true", help=f"write {PLACE}")
    given = parser.parse_args()
    rows: dict[str, dict[str, Any]] = {}
    for _ in range(given.turns):
        for who in NEWCOMERS:
            found = visit(who)
            assert found.first
            seconds, commands, epsilon = found.first
            row = {"page": found.page, "commands": commands, "lines": found.lines}
            rows.setdefault(who, row | {"epsilon": epsilon, "seconds": []})
            rows[who]["seconds"].append(round(seconds, 1))
            print(f"{who}: {seconds:.1f} s", file=sys.stderr)
    kept = {"cores": os.cpu_count(), "python": platform.python_version(), "newcomers": rows}
    if given.write:
        PLACE.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
    print(table(kept))


if __name__ == "__main__":
    main()
