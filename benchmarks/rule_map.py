"""Which rule wins where: the table of docs/how-to/which-mechanism.md, from the kept studies map-*.

python -m benchmarks.rule_map    # after python -m benchmarks.studies keep runs/study-map-adam ...
"""

from __future__ import annotations

from benchmarks.pages import show, table
from benchmarks.studies import KEPT, PAGE, checked_in
from fedlgm_lab.studies import files
from fedlgm_lab.studies.results import Study

HOW_TO = PAGE.parents[1] / "how-to" / "which-mechanism.md"
CLIENTS = {"map-adam": "Adam", "map-sgd": "SGD"}


def rows(name: str) -> list[list[str]]:
    """A row for each network of a study: accuracy of flat clipping, and each rule's difference."""
    file = KEPT / f"{name}.json"
    study, claims = files.load(name), checked_in(name, file)
    frame = Study.read(file).to_frame()
    networks = [network["label"] for network in study.grid["model"]]
    lines = []
    for network in networks:
        flat = frame[(frame["method"] == "gaussian") & (frame["model"] == network)]["accuracy"]
        line = [CLIENTS[name], network, f"{100 * flat.mean():.1f}"]
        for claim, tested in zip(study.claims, claims, strict=True):
            if claim.at["model"] == network:
                low, high = 100 * tested.low, 100 * tested.high
                line.append(
                    f"{100 * tested.mean:+.1f} ({low:+.1f} to {high:+.1f}), {tested.outcome}"
                )
        lines.append(line)
    return lines


def page() -> str:
    """The table."""
    rules = list(dict.fromkeys(claim.a for claim in files.load("map-adam").claims))
    header = ["clients", "layer sizes", "`gaussian` (%)", *(f"`{rule}`" for rule in rules)]
    return table(header, [row for name in CLIENTS for row in rows(name)])


def main() -> None:
    show(HOW_TO, {"map": page()}, write=True)


if __name__ == "__main__":
    main()
