"""The CSV files of several sites: one report of all faults, and public categories and fills."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas
import pytest

from fedlgm import data
from fedlgm.errors import DataError

TABLES = {"train": "sites/*.csv", "test": "test.csv", "target": "ill"}


def frame(rows: int, seed: int) -> pandas.DataFrame:
    random = np.random.default_rng(seed)
    age, dose = random.normal(60, 9, rows).round(1), random.normal(2, 0.5, rows).round(2)
    return pandas.DataFrame({"age": age, "dose": dose, "ill": np.arange(rows) % 2})


@pytest.fixture
def sites(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[pandas.DataFrame]:
    """Three sites with one file each, and a public table, in the working directory."""
    monkeypatch.chdir(tmp_path)
    Path("sites").mkdir()
    frame(10, 9).to_csv("test.csv", index=False)
    frames = [frame(20 + i, i) for i in range(3)]
    for i, each in enumerate(frames):
        each.to_csv(f"sites/hospital-{i}.csv", index=False)
    return frames


def test_each_file_is_a_site_and_columns_are_matched_by_name(sites):
    sites[1][["ill", "dose", "age"]].to_csv("sites/hospital-1.csv", index=False)
    sites[2].to_csv("sites/hospital-2.csv", index=False, encoding="utf-8-sig")
    read = data.load(TABLES)
    assert [column["name"] for column in read.columns] == ["age", "dose"]
    rows = pandas.concat(sites)
    np.testing.assert_array_equal(read.train_x, rows[["age", "dose"]].to_numpy("float32"))
    np.testing.assert_array_equal(np.bincount(read.train_user), [20, 21, 22])
    same = data.load(TABLES | {"train": [f"sites/hospital-{i}.csv" for i in range(3)]})
    np.testing.assert_array_equal(same.train_x, read.train_x)
    of_recipe = data.load("table", file="sites/*.csv", test_file="test.csv", target="ill")
    np.testing.assert_array_equal(of_recipe.train_user, read.train_user)
    assert read.sites == of_recipe.sites == ("hospital-0", "hospital-1", "hospital-2")


def test_files_of_one_name_are_told_apart_by_their_folders_alone(sites):
    for i, each in enumerate(sites):
        Path(f"wards/{i}").mkdir(parents=True)
        each.to_csv(f"wards/{i}/rows.csv", index=False)
    read = data.load(TABLES | {"train": str(Path("wards/*/rows.csv").absolute())})
    assert read.sites == ("0/rows.csv", "1/rows.csv", "2/rows.csv")


def test_the_names_in_a_column_of_users_are_not_names_of_sites(sites):
    for i, each in enumerate(sites):
        each.assign(patient="ann").to_csv(f"sites/hospital-{i}.csv", index=False)
    assert data.load(TABLES | {"users": "patient"}).sites is None
    assert data.load(TABLES | {"users": "patient"}).train_user.tolist() == [0] * 63


def test_the_faults_of_all_files_are_one_report_without_a_value(sites):
    sites[0].to_csv("sites/hospital-0.csv", index=False, sep=";", decimal=",")
    sites[1].assign(ward=3, age=None).to_csv("sites/hospital-1.csv", index=False)
    wrong = sites[2].rename(columns={"dose": "Dose"}).astype({"age": object})
    wrong.loc[3, "age"] = "secret"
    wrong.to_csv("sites/hospital-2.csv", index=False)
    sites[2].to_csv("sites/hospital-3.csv", index=False, encoding="utf-16")
    sites[2].to_csv("sites/hospital-4.csv", index=False, decimal=",")
    sites[2].assign(ill="yes").to_csv("sites/hospital-5.csv", index=False)
    Path("sites/hospital-6.csv").write_text("age,dose,ill\n")
    Path("sites/hospital-7.csv").write_text("")
    with pytest.raises(DataError) as refused:
        data.load(TABLES)
    assert str(refused.value).splitlines() == [
        "data: 8 of 8 training files cannot be used:",
        (
            "  hospital-0.csv: ';' in place of commas between the columns, and decimal commas: write it "
            "again with pandas.read_csv(file, sep=';', decimal=',').to_csv(file, index=False)"
        ),
        (
            "  hospital-1.csv: extra column 'ward': drop, or name the model's inputs in 'inputs'; gaps "
            "in 'age' (21 of 21 rows)"
        ),
        (
            "  hospital-2.csv: no column 'dose' (did you mean 'Dose'?); text in 1 of 22 rows of 'age', "
            "a number in test.csv"
        ),
        "  hospital-3.csv: not UTF-8: write it again as UTF-8",
        (
            "  hospital-4.csv: decimal commas in 'age', 'dose': write it again with "
            "pandas.read_csv(file, decimal=',').to_csv(file, index=False)"
        ),
        "  hospital-5.csv: no number as target 'ill' in 22 rows",
        "  hospital-6.csv: no rows below its header",
        (
            "  hospital-7.csv: cannot be read: No columns to parse from file; check the content and the "
            "owner of the file"
        ),
        "gaps need public figures: 'fill': {'age': NUMBER}, or other 'inputs'",
    ]


def test_the_remedies_of_the_report_work(sites):
    sites[0].to_csv("sites/hospital-0.csv", index=False, sep=";", decimal=",")
    file = "sites/hospital-0.csv"
    pandas.read_csv(file, sep=";", decimal=",").to_csv(file, index=False)
    assert len(data.load(TABLES).train_y) == 63
    sites[0].assign(ward=3).to_csv(file, index=False)
    assert data.load(TABLES | {"inputs": ["age", "dose"]}).train_x.shape == (63, 2)


def with_text(table: pandas.DataFrame) -> pandas.DataFrame:
    rows = np.arange(len(table))
    return table.assign(sex=np.where(rows % 3, "F", "M"), stage=rows % 2 + 1)


def test_text_needs_public_categories_which_are_taken_from_no_private_row(sites):
    with_text(frame(10, 9)).to_csv("test.csv", index=False)
    for i, each in enumerate(sites):
        with_text(each).to_csv(f"sites/hospital-{i}.csv", index=False)
    with pytest.raises(DataError, match=r"'categories': \{'sex': \['F', 'M'\]\}") as refused:
        data.load(TABLES)
    assert "3 of 3 training files and the public test.csv cannot be used" in str(refused.value)
    categories = {"sex": ["F", "M"], "stage": [1, 2]}
    read = data.load(TABLES | {"categories": categories, "standardise": "test"})
    assert [column["name"] for column in read.columns] == ["age", "dose", "sex=M", "stage=2"]
    np.testing.assert_array_equal(read.train_x[:4, 2], [1, 0, 0, 1])
    np.testing.assert_array_equal(read.train_x[:4, 3], [0, 1, 0, 1])
    with_text(sites[1]).replace({"sex": {"M": "X"}}).to_csv("sites/hospital-1.csv", index=False)
    with pytest.raises(DataError, match="other values of 'sex' than its categories") as refused:
        data.load(TABLES | {"categories": categories})
    assert "X" not in str(refused.value)


def test_only_the_files_with_faults_are_named(sites):
    public = pandas.read_csv("test.csv")
    public.loc[2, "age"] = None
    public.to_csv("test.csv", index=False)
    with pytest.raises(DataError, match=r"^data: the public test\.csv cannot be used:"):
        data.load(TABLES)


def test_gaps_are_filled_with_public_values_only(sites):
    sites[0].loc[2, "age"] = None
    sites[0].to_csv("sites/hospital-0.csv", index=False)
    read = data.load(TABLES | {"fill": {"age": 60}})
    assert read.train_x[2, 0] == 60
    assert read.columns[0]["fill"] == 60
    with pytest.raises(DataError, match=r"data\.fill: 'age' needs a finite public number"):
        data.load(TABLES | {"fill": {"age": "mean"}})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"train": "site/*.csv"}, r"no file matches 'site/\*\.csv': the pattern is read from"),
        ({"train": "**/*.csv"}, r"'test\.csv' is the public test table and must not be one of"),
        ({"train": ["test.csv"]}, r"'test\.csv' is the public test table"),
        ({"test": "tests.csv"}, r"data\.test: there is no file 'tests\.csv'"),
        ({"test": pandas.DataFrame()}, "'train' names a file, but 'test' does not: name both"),
        ({"categories": {"sex": ["F"]}}, r"data\.categories: 'sex' needs two or more"),
        ({"categories": ["sex"]}, r"data\.categories: must name columns, as in \{'sex'"),
        ({"categories": {"sex": ["F", "M"]}}, r"has no column 'sex'"),
    ],
)
def test_mistakes_are_named(sites, changed, said):
    with pytest.raises(DataError, match=said):
        data.load(TABLES | changed)


def test_frames_take_categories_too(sites):
    tables = {part: with_text(frame(8, 1)) for part in ("train", "test")}
    read = data.load({**tables, "target": "ill", "categories": {"sex": ["F", "M"]}})
    assert [column["name"] for column in read.columns] == ["age", "dose", "sex=M", "stage"]


def test_a_column_names_sites_where_the_user_says_so(sites):
    rows = pandas.concat([each.assign(ward=f"ward {2 - i}") for i, each in enumerate(sites)])
    tables = {"train": rows, "test": frame(10, 9), "target": "ill", "users": "ward"}
    assert data.load(tables).sites is None
    named = data.load(tables | {"sites": True})
    assert named.sites == ("ward 0", "ward 1", "ward 2")
    np.testing.assert_array_equal(np.bincount(named.train_user), [22, 21, 20])
    assert named.keep(np.arange(5)).sites is None
