"""Names and titles of what makes tables; listed without importing them."""

from __future__ import annotations

TITLES = {
    "adapters": "Private fine-tuning of a public base: adapters, parts of the model, all of it",
    "adaptive": "Allocations learned from releases, beside fixed ones",
    "allocation-shares": "Objectives and budget shares of the allocation rules",
    "allocations": "Seven allocations on digits",
    "attacks": "Inversion without noise, and membership attacks by unit",
    "audit-checks": "How often each check of an audit fails",
    "audits": "Audits of every mechanism and of whole runs, and their false alarms",
    "central-allocations": "Allocation rules in centralised training",
    "clipping-bias": "Bias of LM-DP-SGD over budget, threshold and emphasis",
    "correlated": "Errors of correlated noise in closed form",
    "cut-votes": "Clients' votes between flat clipping and water-filling",
    "distributed-trust": "Accuracy by who adds the noise",
    "false-alarms": "False alarms of the paired test",
    "fashion-mnist": "What the accuracy of the federated FashionMNIST setting depends on",
    "inid": "i.n.i.d. Gaussian and Laplace noise",
    "inid-figures": "i.n.i.d. noise over profiles and dimensions",
    "ladp-budgets": "The budget that LaDP-FL charges, beside the proven epsilon",
    "ladp-constants": "The constants that the LaDP-FL paper leaves open",
    "ladp-overhead": "What LaDP-FL's selection, scores and noise cost a client",
    "lm-dp-sgd": "LM-DP-SGD beside DP-SGD, Auto-S and DP-PSAC",
    "lm-dp-sgd-steps": "Time and memory of a step of LM-DP-SGD",
    "minilm": "Private classification with a public MiniLM",
    "neighbouring-rates": "Differences at neighbouring learning rates",
    "noise-and-budget": "Correlated noise against secret sampling at several budgets",
    "noise-and-split": "Noise over the rounds times its split over the layers",
    "noise-response": "How noise fades during training",
    "outcomes": "Claims of the bundled studies, checked on kept runs",
    "plain-federation": "The federated FashionMNIST setting in plain PyTorch",
    "random-allocation": "Random allocation against Poisson sampling at equal epsilon",
    "real-models": "Allocation rules on models that people train",
    "recommend": "Whether `recommend` predicts the order of the rules",
    "water-filling": "Water-filling beside flat and per-layer clipping",
}
"""Names of the makers, with their titles."""
