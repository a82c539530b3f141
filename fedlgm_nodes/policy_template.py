"""The commented policy that a new node's operator edits."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from fedlgm import mechanisms
from fedlgm.errors import ConfigError
from fedlgm.training import models

DEFAULTS: dict[str, Any] = {
    "client": 0,
    "population": 1,
    "data_name": "my data",
    "kind": "numpy",
    "path": "data.npz",
    "shape": [1, 28, 28],
    "classes": 10,
    "epsilon": 8.0,
    "delta": 1e-5,
    "unit": "client",
    "overlap": None,
    "trust": ["local"],
    "server_key": "",
    "tasks": ["classification"],
    "approval": "policy",
}


def policy_text(name: str, values: Mapping[str, Any]) -> str:
    """A commented policy with the given values, by the names of `DEFAULTS`, and `name`, `labels`
    and others of [data].

    Raises:
        ConfigError: a name is unknown.
    """
    more = {
        key: values[key]
        for key in (
            "labels",
            "class_names",
            "features",
            "standardise",
            "loader",
            "options",
            "people",
        )
        if key in values
    }
    distributed = {key: values.get(key) for key in ("min_cohort", "max_colluders", "peers")}
    unknown = sorted(
        values.keys()
        - DEFAULTS.keys()
        - more.keys()
        - distributed.keys()
        - {"name", "mechanisms", "models"}
    )
    if unknown:
        raise ConfigError(f"unknown value {unknown[0]!r} of a policy; known: {', '.join(DEFAULTS)}")
    private = [mechanism for mechanism in mechanisms.names("client") if mechanism != "none"]
    if values.get("unit") == "example":  # what protects all of the data protects an example, too
        private += mechanisms.names("example")
    filled = {
        "name": name,
        "mechanisms": private,
        "models": list(models.names()),
        **DEFAULTS,
        **values,
    }
    written = {key: json.dumps(value) for key, value in filled.items()}
    stated = filled["overlap"] is not None
    written["overlap"] = f"overlap = {filled['overlap']}" if stated else "# overlap = 2"
    lines = "".join(f"{key} = {_toml(value)}\n" for key, value in more.items())
    shared = (
        DISTRIBUTED.format(**{key: json.dumps(value) for key, value in distributed.items()})
        if distributed["peers"]
        else ""
    )
    return TEMPLATE.format(more_data=lines, distributed=shared, **written)


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        items = (f"{json.dumps(str(key))} = {_toml(item)}" for key, item in value.items())
        return "{" + ", ".join(items) + "}"
    return json.dumps(value)


TEMPLATE = """\
# What this node allows. Read by `fedlgm node serve`; no message can change it. After an edit: `fedlgm node reload`.
# Neither an edit here nor new data resets the ledger: the budget belongs to the data set, for its whole life.

[node]
name = {name}
client = {client} # this node's number in the federation, from 0
population = {population} # registered clients of the federation

[data]
name = {data_name} # identity of the data set; the ledger is bound to it
# kind: "numpy"   path = a .npz with arrays x and y, or a .npy of inputs with labels = a .npy of labels
#       "images"  path = a folder with one folder per class, class_names = ["benign", "malignant"]
#       "idx"     path = images, labels = labels, both in MNIST's format (.gz or not)
#       "csv"     path = a file (.csv, .csv.gz), labels = the label column, features = ["a", "b"] (default: all others),
#                 class_names = ["ill", "well"] if labels are names, standardise = {{age = [50, 20]}}: public figures,
#                 people = {{column = "pseudonym", elsewhere = "elsewhere.txt"}}: without rows of people on this list
#       "parquet" path = a file or folder, and the keys of "csv"
#       "loader"  loader = "package.module:function", a function of yours that returns (x, y); options = {{...}}
kind = {kind}
path = {path}
{more_data}shape = {shape} # of one input, as the model sees it
classes = {classes} # or outputs per example, for other tasks than classification

[privacy]
epsilon = {epsilon} # the most that all releases together may cost, over all runs and servers
delta = {delta}
unit = {unit} # "client": epsilon is for all of this node's data together. "example": for one example each
# "local": this node adds the noise. "central": the server does, and sees the bounded update. "distributed": the nodes
# add it together, and the server sees only the sum; it needs a section [distributed] with min_cohort, max_colluders
# and peers
trust = {trust}
min_noise_multiplier = 0.0 # noise over bound of any one release, at least
largest_clip = 1.0 # l2 bound of any layer of an update, at most
{overlap} # nodes at which one person has rows, at most, as the operators have agreed: releases are charged for a
# person at all of them, and runs for such people are answered. Cannot grow after a release
exact_sums = false # true: examples' gradients add up in float64, asked for or not, so that rounding keeps the bounds

[allow]
mechanisms = {mechanisms}
models = {models}
# Options of these mechanisms are the server's to choose; what a release costs follows from its bounds and noise. To
# allow some values only, at the end of this file: [allow.options.dp-sgd] and style = ["flat"]. A mechanism of your own
# ("package.module:Class") takes the options that are listed so, and no others.
# weights = {{"<SHA-256>" = "/path/base.safetensors"}} # public weights: a model may begin only with these
tasks = {tasks} # "classification", "regression", "binary", "multi-label"
largest_model = 20_000_000 # parameters
most_epochs = 20 # of local training in one round

[ask]
server_key = {server_key} # public key of the only server that can spend the budget. Empty: any sender may ask
runs = [] # labels of runs; they protect nothing, since anybody may invent one. Empty: any
releases = 1000 # over the data set's life; each costs that part of the budget or more, however much noise it has
releases_per_run = 1000
releases_per_day = 1000 # by this machine's clock, in UTC
# "policy": what this policy allows runs at once. "operator": new work waits for `fedlgm node approve`
approval = {approval}
min_separation = 1 # rounds of a run from one answered question to the next; a plan that states more is kept to it

[limits]
message_mib = 96
receive_seconds = 60.0 # for a whole question to arrive
queue_seconds = 120.0 # that a question waits for another one's release
release_seconds = 600.0 # of training; after it the question is refused, charged
connections = 8
# Training takes as long as there are examples. Answers leave after reply_every_seconds, twice, four times ... as long,
# and what is not ready after release_seconds is refused. Equal values leave one moment for all answers.
reply_every_seconds = 0.5
threads = 1
training_idle_seconds = 300.0 # without questions, after which training gives back its memory
kept_replies = 4 # answers kept on disk, so that the same question after a lost connection costs nothing

[socket]
group = "" # group of the processes that may connect
uids = [] # user numbers that may connect; empty: all whom the permissions of run/ admit
{distributed}"""

DISTRIBUTED = """
[distributed]
min_cohort = {min_cohort} # nodes, at least, among which this node's vector is hidden
max_colluders = {max_colluders} # nodes that may be on the server's side: the others' noise has to suffice
# Public keys of all clients' services, in the order of their numbers ("": none), as their operators have sent them to
# you. Only this list says who the peers are: a server that could choose it could be all of them.
peers = {peers}
"""
