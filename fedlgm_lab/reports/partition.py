"""The label histogram of every client, as a picture and a table."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

import numpy as np
from rich.console import Group

from fedlgm_lab.reports.figures import draw_partition
from simulations.config.assembly import Assembly
from simulations.config.recipe import Recipe
from simulations.summaries.planning import class_counts
from simulations.tables import table


class PartitionReport(TypedDict):
    """A recipe's partition.

    Attributes:
        recipe, scheme, clients, classes: the divided data, and the form of the division.
        sizes: min, median and max of the number of examples per client; "empty" is the number of
            clients without examples.
        histogram: number of examples, [clients, classes].
        picture: file of the drawing.
    """

    recipe: str
    scheme: str
    clients: int
    classes: int
    sizes: dict[str, float]
    histogram: list[list[int]]
    picture: str


def partition_report(recipe: Recipe, picture: Path) -> PartitionReport:
    """Compute the label histogram of every client, and draw it to the file `picture`."""
    assembly = Assembly(recipe)
    histogram = class_counts(assembly)
    sizes = histogram.sum(axis=1)
    draw_partition(histogram, f"{assembly.data.dataset.name}, {recipe.data.partition}", picture)
    return {
        "recipe": recipe.name,
        "scheme": recipe.data.partition,
        "clients": len(sizes),
        "classes": histogram.shape[1],
        "sizes": {
            "min": int(sizes.min()),
            "median": float(np.median(sizes)),
            "max": int(sizes.max()),
            "empty": int((sizes == 0).sum()),
        },
        "histogram": histogram.tolist(),
        "picture": str(picture),
    }


def partition_table(report: PartitionReport) -> Group:
    """Make a table of a partition's first clients, and a text on the sizes of all clients."""
    labelled = report["classes"] > 1  # otherwise the table states only numbers of examples
    shown = table(
        f"{report['scheme']} over {report['clients']} clients",
        ["client", "examples", *map(str, range(report["classes"] if labelled else 0))],
        [
            [str(client), str(sum(row)), *(str(count) for count in row if labelled)]
            for client, row in enumerate(report["histogram"][:20])
        ],
    )
    more = report["clients"] - 20
    sizes = report["sizes"]
    text = (
        f"{f'... and {more} more. ' if more > 0 else ''}examples per client: min {sizes['min']}, "
        "median "
        f"{sizes['median']:g}, max {sizes['max']}; {sizes['empty']} clients without data\npicture: "
        f"{report['picture']}"
    )
    return Group(shown, text)
