"""Tables by name: files, and data sets of the Hugging Face Hub in their real formats; class
names."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import datasets
import numpy as np
import pandas
import pytest
from PIL import Image

from fedlgm import data
from fedlgm.data.users import user_numbers
from fedlgm.errors import ConfigError, DataError, Notice

TABLE = pandas.DataFrame(
    {
        "site": ["b", "a", "b"],
        "age": [52, 61, 40],
        "dose": [0.5, 1.0, 2.0],
        "out": ["ill", "well", "ill"],
    }
)


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    TABLE.to_csv(tmp_path / "train.csv", index=False)
    TABLE[1:].to_parquet(tmp_path / "test.parquet")
    return {"file": tmp_path / "train.csv", "test_file": tmp_path / "test.parquet"}


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A cache of its own, and no network."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")


def images(count: int, size: int = 6) -> datasets.Dataset:
    """Rows as flwrlabs/femnist has them: an image, its writer and its class."""
    pixels = np.random.default_rng(count).integers(0, 256, (count, size, size), dtype=np.uint8)
    rows = {
        "image": [Image.fromarray(one) for one in pixels],
        "writer_id": [f"w{i % 3}" for i in range(count)],
        "character": [i % 2 for i in range(count)],
    }
    kinds = {
        "image": datasets.Image(), "writer_id": datasets.Value("string"),
        "character": datasets.ClassLabel(names=["zero", "one"]),
    }  # fmt: skip
    return datasets.Dataset.from_dict(rows, features=datasets.Features(kinds))


def test_files_become_the_set_that_frames_become(files: dict[str, Path]) -> None:
    found = data.load("table", **files, target="out", users="site")
    frames = data.load({"train": TABLE, "test": TABLE[1:], "target": "out", "users": "site"})
    assert all(np.array_equal(found.parts()[name], frames.parts()[name]) for name in frames.parts())
    assert (found.train_x.tolist(), found.train_y.tolist()) == (
        [[52, 0.5], [61, 1], [40, 2]],
        [0, 1, 0],
    )
    assert (found.labels, found.classes, found.train_user.tolist()) == (
        ("ill", "well"),
        2,
        [1, 0, 1],
    )


def test_named_labels_keep_their_order_and_inputs_their_columns(files: dict[str, Path]) -> None:
    found = data.load(
        "table", **files, target="out", inputs=["dose"], labels=["well", "ill", "dead"]
    )
    assert (found.train_x.tolist(), found.train_y.tolist()) == ([[0.5], [1], [2]], [1, 0, 1])
    assert (found.labels, found.classes) == (("well", "ill", "dead"), 3)
    half = data.load(
        "table/private", **files, target="out", inputs=["dose"], labels=["well", "ill", "dead"]
    )
    assert (half.labels, len(half.train_y)) == (found.labels, 1)


def test_names_of_classes_come_with_arrays_too_and_survive_other_users() -> None:
    x = np.zeros((3, 2))
    own = data.load(
        {"train": (x, ["cat", "dog", "cat"]), "test": (x[:2], np.array(["dog", "cat"]))}
    )
    assert (own.train_y.tolist(), own.test_y.tolist(), own.labels) == (
        [0, 1, 0],
        [1, 0],
        ("cat", "dog"),
    )
    assert data.with_users(own, [0, 0, 1]).labels == own.labels
    numbered = data.load(
        {"train": (x, [0, 1, 0]), "test": (x, [0, 1, 0]), "labels": ["cat", "dog"]}
    )
    assert (numbered.labels, numbered.classes) == (("cat", "dog"), 2)


def test_a_copy_of_a_hub_data_set_is_read_from_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / "copy"  # of which no name is that of a split
    folder.mkdir()
    images(10).to_parquet(folder / "train-00000-of-00001.parquet")
    found = data.load(
        "hf:flwrlabs/femnist", folder, splits=["train[:80%]", "train[80%:]"],
        inputs=["image"], target="character", users="writer_id", channels=1,
    )  # fmt: skip
    assert (found.shape, len(found.train_y), len(found.test_y)) == ((1, 6, 6), 8, 2)
    assert (found.labels, found.classes, len(set(found.train_user))) == (("zero", "one"), 2, 3)
    pixels = np.asarray(images(10)[0]["image"], dtype=np.float32)
    assert np.allclose(found.train_x[0, 0], pixels / 127.5 - 1)
    small = data.load(
        "hf:x/y",
        folder,
        splits=["train[:80%]", "train[80%:]"],
        inputs=["image"],
        target="character",
        image_size=4,
    )
    assert small.shape == (3, 4, 4)


def test_the_local_cache_is_enough_without_a_network(tmp_path: Path) -> None:
    place = tmp_path / "cache" / "owner___name" / "default" / "0.0.0" / ("0" * 40)
    table = datasets.Dataset.from_pandas(TABLE.drop(columns="site"))
    splits = datasets.SplitDict()
    for split in ("train", "test"):
        table.save_to_disk(tmp_path / split)
        place.mkdir(parents=True, exist_ok=True)
        (part,) = (tmp_path / split).glob("*.arrow")
        part.rename(place / f"name-{split}.arrow")
        splits.add(datasets.SplitInfo(split, num_examples=3, dataset_name="name"))
    info = datasets.DatasetInfo(
        builder_name="parquet",
        dataset_name="name",
        config_name="default",
        version="0.0.0",
        splits=splits,
        features=table.features,
    )
    info.write_to_directory(str(place))
    found = data.load("hf:owner/name", target="out")
    assert (found.train_x.shape, found.labels) == ((3, 2), ("ill", "well"))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"target": "out"}, r"column 'site' of 'train' holds text, not numbers: drop it"),
        (
            {"users": "site"},
            r"data\.target: which column is the target\? It must be one of 'age', 'dose', 'out'",
        ),
        ({"target": "Out"}, r"'train' has no column 'Out'; did you mean 'out'\?"),
        (
            {"target": "out", "inputs": ["agee"]},
            r"'train' has no column 'agee'; did you mean 'age'",
        ),
        ({"target": "out", "users": "Site"}, r"'train' has no column 'Site'"),
        (
            {"target": "out", "inputs": ["age"], "labels": ["ill"]},
            r"labels: must name two or more classes",
        ),
        (
            {"target": "out", "inputs": ["age"], "labels": ["ill", "dead"]},
            r"data\.labels: 1 training targets, the first in row 1, are none of the classes that data\.labels names",
        ),
        ({"file": "nowhere.csv"}, r"data\.file: there is no file 'nowhere\.csv'"),
        (
            {"file": None},
            r"data\.file: name the \.csv or \.parquet file with the training examples",
        ),
        (
            {"test_file": None},
            r"data\.test_file: name the \.csv or \.parquet file with public test examples",
        ),
        (
            {"test_file": "rows.tsv"},
            r"data\.test_file: 'rows\.tsv' must be a \.csv, \.csv\.gz or \.parquet file",
        ),
    ],
)
def test_a_mistake_in_files_is_one_sentence(
    options: dict, message: str, files: dict[str, Path]
) -> None:
    with pytest.raises(DataError, match=message) as caught:
        data.load("table", **files | options)
    assert "\n" not in str(caught.value)


def test_a_class_that_only_private_rows_have_and_damaged_files_are_refused(
    files, tmp_path: Path
) -> None:
    TABLE[:1].to_csv(tmp_path / "few.csv", index=False)
    with pytest.raises(
        DataError, match=r"labels: must name two or more classes, each once, got ill"
    ):
        data.load(
            "table", file=files["file"], test_file=tmp_path / "few.csv", target="out", users="site"
        )
    (tmp_path / "empty.csv").write_text("")
    (tmp_path / "bad.parquet").write_text("no parquet")
    TABLE.to_csv(tmp_path / "german.csv", sep=";", index=False)
    with pytest.raises(
        DataError,
        match=r"data\.file: '.*german.csv' has ';' between its columns, not commas: write it with",
    ):
        data.load("table", **files | {"file": tmp_path / "german.csv"}, target="out")
    for name in ("empty.csv", "bad.parquet"):
        with pytest.raises(DataError, match=rf"data\.file: '.*{name}' cannot be read: "):
            data.load("table", **files | {"file": tmp_path / name}, target="out")


@pytest.mark.parametrize(
    ("name", "given", "message"),
    [
        (
            "hf:owner/absent",
            {},
            r"'hf:owner/absent' is not in the local cache, and .* cannot be reached",
        ),
        (
            "hf:owner/name",
            {"data_dir": "nowhere"},
            r"data\.dir: 'nowhere' is not a folder; it must hold the files",
        ),
        (
            "hf:owner/name",
            {"data_dir": ".", "splits": ["train", "dev"]},
            r"cannot be read: Unknown split \"dev\"",
        ),
        (
            "hf:owner/name",
            {"data_dir": ".", "subset": "other"},
            r"cannot be read: BuilderConfig 'other' not found",
        ),
        (
            "hf:owner/name",
            {"splits": ["train", "train"]},
            r"data\.splits: must be two different splits",
        ),
        (
            "hf:owner/name",
            {"data_dir": ".", "splits": ["train[:5]", "train[5:]"], "target": "character"},
            r"data\.inputs: column 'image' holds an array per row: name only it, as data\.inputs = \['image'\]",
        ),
    ],
)
def test_a_mistake_about_the_hub_is_one_sentence(
    name, given, message, tmp_path, monkeypatch
) -> None:
    whole = images(10).remove_columns("writer_id").add_column("hsf_id", list(range(10)))
    (tmp_path / "copy").mkdir()
    monkeypatch.chdir(tmp_path / "copy")
    whole.to_parquet("train-00000-of-00001.parquet")
    with pytest.raises(DataError, match=message) as caught:
        data.load(name, **given)
    assert "\n" not in str(caught.value)


def test_images_of_several_sizes_need_one_and_lists_one_length(tmp_path: Path) -> None:
    mixed = datasets.concatenate_datasets([images(2), images(2, size=8)]).remove_columns(
        "writer_id"
    )
    with pytest.raises(
        DataError, match=r"data\.image_size: images of column 'image' differ in size"
    ):
        data.load({"train": mixed, "test": mixed, "target": "character"})
    lists = datasets.Dataset.from_dict({"curve": [[1.0, 2.0], [3.0, 4.0]], "label": [0, 1]})
    assert data.load({"train": lists, "test": lists}).train_x.tolist() == [[1, 2], [3, 4]]
    ragged = datasets.Dataset.from_dict({"curve": [[1.0, 2.0], [3.0]], "label": [0, 1]})
    with pytest.raises(DataError, match=r"column 'curve' of 'train' holds lists of unequal length"):
        data.load({"train": ragged, "test": ragged})


def test_keys_of_another_kind_of_set_are_refused(files: dict[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"file is for data\.name = 'table', not for 'digits'"):
        data.load("digits", **files)
    with pytest.raises(
        ConfigError, match=r"subset is for data\.name = 'hf:owner/name', not for 'table'"
    ):
        data.load("table", **files, subset="x")
    with pytest.raises(
        ConfigError,
        match=r"set data\.name = 'table', data\.file = 'rows\.csv', data\.test_file and",
    ):
        data.load("rows.csv")


def test_the_file_of_the_cache_test_is_what_datasets_writes(tmp_path: Path) -> None:
    """A cache that `load_dataset` has made has the files that the test above writes by hand."""
    (tmp_path / "copy").mkdir()
    TABLE.to_parquet(tmp_path / "copy" / "train.parquet")
    datasets.load_dataset(str(tmp_path / "copy"), cache_dir=str(tmp_path / "cache"))
    (info,) = (tmp_path / "cache").rglob("dataset_info.json")
    assert {"builder_name", "config_name", "dataset_name", "features", "splits"} <= set(
        json.loads(info.read_text())
    )
    assert [path.suffix for path in info.parent.glob("*train*")] == [".arrow"]


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).write_text(text)
    return folder / name


class TestTextStaysText:
    """Users and classes of a CSV file are names, as they are written."""

    def load(self, folder: Path, train: str, test: str, **options):
        files = {"file": write(folder, "a.csv", train), "test_file": write(folder, "b.csv", test)}
        return data.load("table", **files, target="out", **options)

    @pytest.mark.parametrize(
        ("a", "b"), [("007", "7"), ("1e5", "100000"), ("1.10", "1.1"), ("None", "NA")]
    )
    def test_users_are_as_many_as_their_spellings(self, tmp_path, recwarn, a, b):
        rows = f"who,x,out\n{a},1,0\n{b},2,1\n"
        found = self.load(tmp_path, rows, rows, users="who")
        assert len(set(found.train_user)) == 2
        assert any("count as two users" in str(one.message) for one in recwarn) is (a != "None")

    def test_one_text_among_many_numbers_is_a_user(self, tmp_path):
        rows = (
            "who,x,out\n"
            + "".join(f"{i % 50},{i},{i % 2}\n" for i in range(300_000))
            + "guest,1,1\n"
        )
        found = self.load(tmp_path, rows, "who,x,out\n1,1,0\n2,2,1\n", users="who")
        assert len(set(found.train_user)) == 51

    def test_classes_that_pandas_takes_for_gaps_are_classes(self, tmp_path):
        rows = "x,out\n1,None\n2,NA\n3,null\n"
        assert self.load(tmp_path, rows, rows).labels == ("NA", "None", "null")

    @pytest.mark.parametrize(("a", "b"), [("01", "1"), ("1", "1.0")])
    def test_two_spellings_of_a_class_are_refused(self, tmp_path, a, b):
        rows = f"x,out\n1,{a}\n2,{b}\n3,0\n"
        with pytest.raises(
            DataError, match=rf"column 'out' has '{a}' and '{b}', which would become the same value"
        ):
            self.load(tmp_path, rows, "x,out\n1,0\n2,1\n")

    @pytest.mark.parametrize(
        ("train", "test", "a", "b"),
        [
            (("True", "true"),) * 2 + ("True", "true"),
            (("TRUE", "FALSE"), ("True", "False"), "FALSE", "False"),
        ],
    )
    def test_two_spellings_of_a_truth_value_are_refused(self, tmp_path, train, test, a, b):
        files = ["x,out\n1,{}\n2,{}\n".format(*words) for words in (train, test)]
        with pytest.raises(
            DataError, match=rf"column 'out' has '{a}' and '{b}', which would become the same value"
        ):
            self.load(tmp_path, *files)

    def test_a_column_without_a_name_holds_text_too(self, tmp_path):
        rows = ",x,out\n007,1,0\n7,2,1\n"
        with pytest.warns(Notice, match="count as two users"):
            found = self.load(tmp_path, rows, rows, users="Unnamed: 0", inputs=["x"])
        assert found.train_user.tolist() == [0, 1]

    def test_rows_with_more_values_than_names_are_refused(self, tmp_path):
        rows = "who,x,out\n007,5,1,0\n7,6,2,1\n"
        with pytest.raises(
            DataError, match=r"a\.csv has rows with more values than its header has names: name"
        ):
            self.load(tmp_path, rows, "x,out\n1,0\n2,1\n", users="who")

    def test_labels_make_numbers_names(self, tmp_path):
        rows = "x,out\n1,01\n2,1\n"
        assert self.load(tmp_path, rows, rows, labels=["1", "01"]).train_y.tolist() == [1, 0]

    def test_numbers_and_truth_values_stay_what_they_were(self, tmp_path):
        rows = "x,out\n1,1.10\n2,1.1\n3,-2.5\n"
        assert self.load(tmp_path, rows, rows).train_y.tolist() == pytest.approx([1.1, 1.1, -2.5])
        rows = "x,out\n1,True\n2,False\n"
        assert self.load(tmp_path, rows, rows).train_y.dtype == np.float32

    @pytest.mark.parametrize("gap", ["NA", "", "nan"])
    def test_a_gap_among_numbers_is_no_class(self, tmp_path, gap):
        with pytest.raises(
            DataError,
            match=r"data\.target: column 'out' of 'train' holds numbers, but '.*' in 1 rows",
        ):
            self.load(tmp_path, f"x,out\n1,0\n2,{gap}\n", "x,out\n1,0\n2,1\n")

    def test_an_empty_name_is_no_class(self, tmp_path):
        rows = "x,out\n1,ill\n2,well\n"
        with pytest.raises(DataError, match=r"training targets: 1 of 3 rows have no target"):
            self.load(tmp_path, rows + '3,""\n', rows)

    def test_a_header_without_rows_is_refused(self, tmp_path):
        with pytest.raises(DataError, match=r"data\.file: '.*a\.csv' has no rows below its header"):
            self.load(tmp_path, "x,out\n", "x,out\n1,0\n")

    def test_endings_in_capitals_and_compressed_files_are_read(self, tmp_path):
        TABLE.to_csv(tmp_path / "A.CSV", index=False)
        TABLE.to_csv(tmp_path / "b.csv.gz", index=False)
        found = data.load(
            "table",
            file=tmp_path / "A.CSV",
            test_file=tmp_path / "b.csv.gz",
            target="out",
            users="site",
        )
        assert found.train_x.tolist() == found.test_x.tolist()


@pytest.mark.parametrize(
    ("users", "message"),
    [
        ([2**63, 2**63 + 1, -1], r"users: floats from 2\*\*53 on may stand for several numbers"),
        ([2**53, 2**53 + 1, 0.5], r"users: floats from 2\*\*53 on may stand for several numbers"),
        (
            np.array([1, True, 2], dtype=object),
            "users has '1' and 'True', which would become the same value",
        ),
        ([Decimal("1.10"), Decimal("1.1"), 2], r"users has '1\.10' and '1\.1', which would become"),
    ],
)
def test_users_that_would_become_one_are_refused(users, message):
    with pytest.raises(DataError, match=message):
        user_numbers(users, 3)


class TestCsvFilesOfTheHub:
    """Users and classes of a Hub data set that consists of CSV files are text as well."""

    def load(self, folder: Path, train: str, test: str, **options):
        (folder / "set").mkdir()
        write(folder / "set", "train.csv", train)
        write(folder / "set", "test.csv", test)
        return data.load("hf:owner/name", folder / "set", target="out", **options)

    def test_users_are_as_many_as_their_spellings(self, tmp_path):
        rows = "who,x,out\n007,1,0\n7,2,1\n1e5,2,1\n100000,3,0\n"
        with pytest.warns(Notice, match="count as two users"):
            found = self.load(tmp_path, rows, rows, users="who")
        assert len(set(found.train_user)) == 4
        assert found.train_y.tolist() == [0, 1, 1, 0]
        assert found.classes == 2

    def test_classes_that_pandas_takes_for_gaps_are_classes(self, tmp_path):
        rows = "x,out\n1,None\n2,NA\n3,null\n"
        assert self.load(tmp_path, rows, rows).labels == ("NA", "None", "null")

    def test_two_spellings_of_a_class_are_refused(self, tmp_path):
        with pytest.raises(DataError, match="column 'out' has '01' and '1', which would become"):
            self.load(tmp_path, "x,out\n1,01\n2,1\n3,0\n", "x,out\n1,0\n2,1\n")

    def test_a_gap_among_the_inputs_is_named(self, tmp_path):
        rows = "x,out\n1,a\n,b\n"
        with pytest.raises(DataError, match="column 'x' of 'train' has no finite number in 1 of 2"):
            self.load(tmp_path, rows, rows)


def test_a_tilde_is_the_users_home(files, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    table = data.load(
        "table", file="~/train.csv", test_file="~/test.parquet", target="out", users="site"
    )
    assert len(table.train_y) == 3
    (tmp_path / "set").mkdir()
    images(10).to_parquet(tmp_path / "set" / "train-00000-of-00001.parquet")
    split = {"splits": ["train[:80%]", "train[80%:]"], "inputs": ["image"], "target": "character"}
    assert len(data.load("hf:x/y", "~/set", **split).train_y) == 8
