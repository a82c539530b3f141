"""Heart disease in four hospitals: a private logistic regression on UCI's four files.

Download processed.cleveland.data, processed.hungarian.data, processed.switzerland.data and
processed.va.data from https://archive.ics.uci.edu/dataset/45/heart+disease into a folder, then
run: python heart_disease.py FOLDER [EPSILON]

Copies with a header, and Kaggle's copy of Cleveland's rows with its other codes, are read too.
"""

import sys
from pathlib import Path

import pandas

import simulations

COLUMNS = [
    "age", "sex", "cp", "trestbps", "chol", "fbs", "restecg", "thalach", "exang", "oldpeak",
    "slope", "ca", "thal", "disease",
]  # fmt: skip
USUAL = {"age": 50, "trestbps": 130, "fbs": 0.5, "thalach": 140, "exang": 0.5, "oldpeak": 1}
SPREAD = {"age": 10, "trestbps": 20, "fbs": 0.5, "thalach": 25, "exang": 0.5, "oldpeak": 1}
"""Round figures of adults with chest pain, not of these rows. chol, slope, ca and thal are missing
at whole hospitals and are left out."""

folder, epsilon = Path(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 4.0
Path("sites").mkdir(exist_ok=True)
test = []
for file in sorted(folder.glob("processed.*.data")):
    patients = pandas.read_csv(file, names=COLUMNS, na_values="?", encoding="utf-8-sig")
    patients = patients[patients.age != "age"].astype(float)
    if patients.cp.min() == 0:  # Kaggle's codes
        patients.cp = patients.cp.map({0: 4, 1: 2, 2: 3, 3: 1})
        patients.restecg = patients.restecg.map({0: 2, 1: 0, 2: 1})
        patients.disease = 1 - patients.disease
    rows = patients[list(USUAL)].assign(
        male=patients.sex,
        no_pain=(patients.cp == 4).astype(int),
        abnormal_ecg=(patients.restecg > 0).astype(int),
        disease=(patients.disease > 0).astype(int),
    )
    test.append(rows[::5])  # public
    rows.drop(rows.index[::5]).to_csv(f"sites/{file.name.split('.')[1]}.csv", index=False)
pandas.concat(test).to_csv("test.csv", index=False)

result = simulations.simulate(
    "ten-hospitals",
    data={
        "train": "sites/*.csv",
        "test": "test.csv",
        "target": "disease",
        "fill": USUAL,
        "standardise": {name: (USUAL[name], SPREAD[name]) for name in USUAL},
    },
    overrides={"privacy.epsilon": epsilon, "privacy.delta": 1e-4},
)
metrics = result.metrics
print(f"AUC {metrics['auc']:.4f} ({metrics['auc_low']:.4f} to {metrics['auc_high']:.4f})")
print(f"epsilon {result.epsilon:.4g}; {result['attack']}")
print(result.coefficients())
