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
    """The text of a commented policy with the given values. Their names are those in `DEFAULTS`,
    `name`, `labels` and other keys of [data], `mechanisms`, `models`, and the keys of
    [distributed].

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
# What this node allows. `fedlgm node serve` reads this file, and no message can change it. After an edit, run
# `fedlgm node reload`.
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
#                 people = {{column = "pseudonym", elsewhere = "elsewhere.txt"}}: leaves out people on this list
#       "parquet" path = a file or folder, and the keys of "csv"
#       "loader"  loader = "package.module:function", a function of yours that returns (x, y); options = {{...}}
kind = {kind}
path = {path}
{more_data}shape = {shape} # of one input, as the model sees it
classes = {classes} # for tasks other than classification: number of outputs per example

[privacy]
epsilon = {epsilon} # the most that all releases together may cost, over all runs and servers
delta = {delta}
unit = {unit} # "client": epsilon protects all of this node's data together. "example": each single example
# "local": this node adds the noise. "central": the server adds the noise, and sees the bounded update. "distributed":
# the nodes together add the noise, and the server sees only the sum. "distributed" needs a section [distributed] with
# min_cohort, max_colluders and peers
trust = {trust}
min_noise_multiplier = 0.0 # smallest allowed ratio of noise to bound in a release
largest_clip = 1.0 # largest allowed l2 bound of a layer of an update
{overlap} # largest number of nodes at which one person has rows, as the operators have agreed. Each release is
# charged as if a person had rows at all of them, and this node then answers runs whose epsilon is stated for such a
# person. The number cannot grow after a release
exact_sums = false # true: examples' gradients are always summed in float64, so that rounding keeps the bounds

[allow]
mechanisms = {mechanisms}
models = {models}
# The server chooses the options of these mechanisms, and the cost of a release follows from its bounds and noise. To
# allow only some values of an option, list them at the end of this file: [allow.options.dp-sgd] and style = ["flat"].
# A mechanism of your own ("package.module:Class") takes only options that are listed in this way.
# weights = {{"<SHA-256>" = "/path/base.safetensors"}} # the only public weights with which a model may begin
tasks = {tasks} # "classification", "regression", "binary", "multi-label"
largest_model = 20_000_000 # largest number of a model's parameters
most_epochs = 20 # largest number of epochs of local training in one round

[ask]
server_key = {server_key} # public key of the only server that can spend the budget. Empty: any sender may ask
runs = [] # labels of the runs that are answered. Empty: any. Labels protect nothing, because anyone can invent one
releases = 1000 # over the data set's life; each costs at least an equal share of the budget, whatever its noise
releases_per_run = 1000
releases_per_day = 1000 # by this machine's clock, in UTC
# "policy": work that this policy allows runs at once. "operator": new work waits for `fedlgm node approve`
approval = {approval}
min_separation = 1 # least distance in rounds between two answered questions of a run; a plan may require more

[limits]
message_mib = 96
receive_seconds = 60.0 # for a whole question to arrive
queue_seconds = 120.0 # for which a question waits while another release is made
release_seconds = 600.0 # of training; after this time the question is refused, but it remains charged
connections = 8
# The time of training depends on the number of examples. To hide it, answers leave only after reply_every_seconds,
# twice that time, four times that time, and so on. A release that is not ready after release_seconds is refused. If
# both values are equal, all answers leave after the same time.
reply_every_seconds = 0.5
threads = 1
training_idle_seconds = 300.0 # without questions; after this time training gives back its memory
kept_replies = 4 # answers kept on disk, so that the same question after a lost connection costs nothing

[socket]
group = "" # group of the processes that may connect
uids = [] # user numbers that may connect; empty: all users that the permissions of run/ admit
{distributed}"""

DISTRIBUTED = """
[distributed]
min_cohort = {min_cohort} # least number of nodes among which this node's vector is hidden
max_colluders = {max_colluders} # number of nodes that may collude with the server; the other nodes' noise must suffice
# Public keys of all clients' services, in the order of the clients' numbers ("": no service). The services' operators
# have sent you these keys. Only this list says who the peers are: a server that could choose the list could name
# services of its own.
peers = {peers}
"""
