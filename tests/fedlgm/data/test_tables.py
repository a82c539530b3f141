"""Tables as data sets: pandas frames, `datasets.Dataset` objects, and what a newcomer gets
wrong."""

from __future__ import annotations

import datasets
import numpy as np
import pandas
import pytest

from fedlgm import data
from fedlgm.errors import DataError, Notice

NUMBERS = pandas.DataFrame(
    {
        "site": ["b", "a", "b"],
        "age": [52, 61, 40],
        "dose": [0.5, 1.0, 2.0],
        "smokes": [True, False, True],
        "out": [1, 0, 1],
    }
)
TOKENS = datasets.Dataset.from_dict(
    {
        "input_ids": [[5, 6, 7], [8], [9, 4]],
        "label": [0, 1, 2],
        "who": ["x", "y", "x"],
        "text": ["a b c", "d", "e f"],
    }
)
GAPS = NUMBERS.drop(columns="site").assign(age=[1.0, float("nan"), *[1.0] * (len(NUMBERS) - 2)])


class Tokenizer:
    """Numbers words by their length."""

    pad_token_id = 9

    def __call__(self, texts, truncation, max_length):
        rows = [
            [len(word) for word in text.split()][: max_length if truncation else None]
            for text in texts
        ]
        return {"input_ids": rows, "attention_mask": [[1] * len(row) for row in rows]}


def test_a_frame_of_numbers_gives_features_in_the_order_of_its_columns():
    found = data.load({"train": NUMBERS, "test": NUMBERS[:2], "users": "site", "target": "out"})
    assert found.train_x.tolist() == [[52, 0.5, 1], [61, 1, 0], [40, 2, 1]]
    assert (found.train_y.tolist(), found.test_y.tolist()) == ([1, 0, 1], [1, 0])
    assert found.train_user.tolist() == [1, 0, 1]


def test_the_test_part_may_order_its_columns_otherwise():
    turned = NUMBERS[["out", "smokes", "dose", "age", "site"]]
    found = data.load({"train": NUMBERS, "test": turned, "users": "site", "target": "out"})
    assert np.array_equal(found.train_x, found.test_x)


def test_rows_of_tokens_are_padded_to_the_longest_test_row_and_masked():
    parts = datasets.DatasetDict(train=TOKENS, test=TOKENS.select([1, 0]), validation=TOKENS)
    found = data.load(data.with_users(parts, "who"))
    tokens, mask = found.train_x
    assert tokens.tolist() == [[5, 6, 7], [8, 0, 0], [9, 4, 0]]
    assert mask.tolist() == [[1, 1, 1], [1, 0, 0], [1, 1, 0]]
    assert found.test_x[0].tolist() == [[8, 0, 0], [5, 6, 7]]
    assert (found.train_y.tolist(), found.train_user.tolist()) == ([0, 1, 2], [0, 1, 0])


def test_tokens_without_labels_are_their_own_target_but_for_the_padding():
    bare = TOKENS.remove_columns(["label", "who"])
    found = data.load({"train": bare, "test": bare})
    assert found.train_y.tolist() == [[5, 6, 7], [8, -100, -100], [9, 4, -100]]


def test_labels_of_tokens_are_padded_with_what_does_not_count_and_even_rows_need_no_mask():
    ragged = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "labels": [[0, -100], [1]]})
    assert data.load({"train": ragged, "test": ragged}).train_y.tolist() == [[0, -100], [1, -100]]
    even = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "labels": [0, 1]})
    assert isinstance(data.load({"train": even, "test": even}).train_x, np.ndarray)


def test_a_mask_of_the_tables_own_and_types_are_kept_in_the_models_order():
    table = datasets.Dataset.from_dict(
        {"token_type_ids": [[0, 1]], "input_ids": [[1, 2]], "label": [0]}
    )
    tokens, mask, types = data.load({"train": table, "test": table}).train_x
    assert (tokens.tolist(), mask.tolist(), types.tolist()) == ([[1, 2]], [[1, 1]], [[0, 1]])


def test_a_frame_of_texts_is_tokenized():
    texts = pandas.DataFrame({"text": ["to be or not", "be"], "label": [0, 1]})
    options = {"text": "text", "tokenizer": Tokenizer(), "length": 3}
    found = data.load({"train": texts, "test": texts[1:], **options})
    assert found.train_x[0].tolist() == [[2, 2, 2], [2, 9, 9]]
    assert found.test_x[1].tolist() == [[1, 0, 0]]


def test_no_private_text_decides_how_many_tokens_the_others_have():
    """One text more would change the inputs of all others, which no bound of its own contribution
    covers."""
    texts = pandas.DataFrame({"text": ["to be", "be", "to be or not"], "label": [0, 1, 0]})
    given = {"test": texts[1:2], "text": "text", "tokenizer": Tokenizer()}
    whole, fewer = (
        data.load({"train": train, "length": 5, **given}) for train in (texts, texts[:2])
    )
    for one, other in zip(whole.train_x, fewer.train_x, strict=True):
        assert one.shape == (3, 5)
        np.testing.assert_array_equal(one[:2], other)
    with pytest.raises(
        DataError,
        match=r"longest training row, which is private: .* give a public number of tokens",
    ):
        data.load({"train": texts, **given})
    longest = data.load(
        {"train": texts[:2], **given, "test": texts[2:]}
    )  # of the test texts, which are public
    assert longest.train_x[0].shape == (2, 4)


def test_rows_of_tokens_beyond_a_given_length_are_refused():
    rows = datasets.Dataset.from_dict({"input_ids": [[1, 2, 3], [3]], "label": [0, 1]})
    assert data.load({"train": rows, "test": rows, "length": 4}).train_x[0].tolist() == [
        [1, 2, 3, 0],
        [3, 0, 0, 0],
    ]
    with pytest.raises(DataError, match="rows have up to 3 tokens, but length is 2"):
        data.load({"train": rows, "test": rows, "length": 2})


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (TOKENS, r"one table has no test part.*train_test_split"),
        ({"train": NUMBERS, "test": (1, 2)}, r"'test' is of type tuple"),
        ({"train": NUMBERS, "test": NUMBERS}, r"which column is the target.*'age'.*'out'"),
        (
            {"train": NUMBERS, "test": NUMBERS, "target": "Out"},
            r"no column 'Out'; did you mean 'out'\?",
        ),
        (
            {"train": NUMBERS, "test": NUMBERS, "users": "Site", "target": "out"},
            r"no column 'Site'",
        ),
        (
            {"train": NUMBERS, "test": NUMBERS, "target": "out"},
            "'site' of 'train' holds text, not numbers: drop it, or list its public categories",
        ),
        (
            {"train": GAPS, "test": GAPS, "target": "out"},
            r"column 'age' of 'train' has no finite number in 1 of \d rows, first in row 1, counted from 0: fill",
        ),
        (
            {"train": NUMBERS, "test": NUMBERS, "text": "site"},
            r"'text'.*and 'tokenizer'.*given together",
        ),
        (
            {"train": TOKENS, "test": TOKENS.remove_columns("input_ids")},
            r"'test' has no column 'input_ids'",
        ),
        (
            {
                "train": NUMBERS,
                "test": NUMBERS.drop(columns="age"),
                "users": "site",
                "target": "out",
            },
            r"no column 'age'",
        ),
        (
            {"train": NUMBERS, "test": NUMBERS, "target": "out", "usres": "site"},
            r"unknown key 'usres'",
        ),
    ],
)
def test_a_mistake_is_named_with_its_remedy(given, message):
    with pytest.raises(DataError, match=message):
        data.load(given)


def test_users_are_for_data_of_ones_own():
    x = np.zeros((3, 2))
    with pytest.raises(DataError, match=r"users = 'site' names a column, which arrays do not have"):
        data.load(data.with_users({"train": (x, [0, 1, 0]), "test": (x, [0, 1, 0])}, "site"))
    with pytest.raises(DataError, match="users names the users of your own data"):
        data.with_users("digits", "writer")
    x = np.zeros((3, 2))
    own = data.DataSet.from_arrays((x, [0, 1, 0]), (x, [0, 1, 0]))
    assert data.with_users(own, ["b", "a", "b"]).train_user.tolist() == [1, 0, 1]


@pytest.mark.parametrize(
    ("train", "test", "words"),
    [
        ({"token_type_ids": [[0, 0], [0]]}, {}, "'test' has no column 'token_type_ids'"),
        (
            {"attention_mask": [[1, 1, 1], [1]]},
            {},
            "row 0 of 'train' has 2 tokens, but 3 in 'attention_mask'",
        ),
        (
            {"input_ids": [[1.5, 2.0], [4.0]]},
            {},
            "row 0 of column 'input_ids' of 'train' is not a list of whole",
        ),
        (
            {},
            {"input_ids": [None, [4]]},
            "row 0 of column 'input_ids' of 'test' is not a list of whole",
        ),
        (
            {"input_ids": [1, 4]},
            {},
            "row 0 of column 'input_ids' of 'train' is not a list of whole",
        ),
    ],
)
def test_rows_of_tokens_that_are_none_are_named(train, test, words):
    tokens = {"input_ids": [[1, 2], [4]], "label": [0, 1]}
    with pytest.raises(DataError, match=words):
        data.load(
            {
                "train": datasets.Dataset.from_dict(tokens | train),
                "test": datasets.Dataset.from_dict(tokens | test),
            }
        )


def test_all_unsuitable_columns_are_named_at_once():
    table = GAPS.assign(day=pandas.Timestamp("2026-01-01"), sex="f")
    with pytest.raises(
        DataError,
        match=r"'age' .* in 1 of 3 rows.*; also unsuitable: 'day' \(dates\), 'sex' \(text\)",
    ):
        data.load({"train": table, "test": table, "target": "out"})


def test_two_columns_of_one_name_and_missing_names_are_refused():
    table = NUMBERS.drop(columns="site")
    twice = pandas.concat([table, table[["age"]]], axis=1)
    with pytest.raises(
        DataError, match="'train' has several columns 'age': rename or drop all but one"
    ):
        data.load({"train": twice, "test": twice, "target": "out"})
    named = table.assign(out=["ill", None, "well"])
    with pytest.raises(
        DataError,
        match=r"training targets: 1 of 3 rows have no target \(NaN or empty\), first row 1",
    ):
        data.load({"train": named, "test": named.dropna(), "target": "out"})
    for absent in (None, float("nan"), pandas.NA):
        sites = NUMBERS.assign(site=["a", absent, "b"])
        with pytest.raises(
            DataError, match=r"users: 1 of 3 rows have no user \(NaN or empty\), first row 1"
        ):
            data.load({"train": sites, "test": table, "target": "out", "users": "site"})


def test_a_dictionary_of_splits_without_a_test_part_names_the_one_that_could_be_it():
    parts = datasets.DatasetDict(train=TOKENS, validation=TOKENS)
    with pytest.raises(DataError, match="give the validation part as 'test'"):
        data.load(data.with_users(parts, "who"))


def test_a_column_without_a_name_is_noticed():
    table = NUMBERS.drop(columns="site").rename(columns={"age": "Unnamed: 0"})
    with pytest.warns(
        Notice,
        match=r"column 'Unnamed: 0' is an input of the model, but it has no name and may be the",
    ):
        data.load({"train": table, "test": table, "target": "out"})


def test_whether_there_is_a_mask_follows_from_public_rows_alone():
    even = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3, 4]], "label": [0, 1]})
    ragged = datasets.Dataset.from_dict({"input_ids": [[1, 2], [3]], "label": [0, 1]})
    assert isinstance(data.load({"train": even, "test": even}).train_x, np.ndarray)
    assert len(data.load({"train": even, "test": ragged}).train_x) == 2
    with pytest.raises(
        DataError, match=r"all test rows have 2 tokens, but some training rows have fewer.*'length'"
    ):
        data.load({"train": ragged, "test": even})
    assert len(data.load({"train": ragged, "test": even, "length": 2}).train_x) == 2


AGE: dict = {"name": "age", "dtype": "float"}


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (
            [AGE],
            r"columns: 1 is described, but the training inputs are \(3, 2\): describe each column of a table",
        ),
        ([AGE, {"name": "age", "dtype": "int"}], r"columns: two are named 'age': rename one"),
        (
            [AGE, {"name": "(intercept)", "dtype": "int"}],
            r"columns: '\(intercept\)' is the name of a linear model's",
        ),
        (
            [AGE, {"name": "dose"}],
            r"columns: 'dose' must have a dtype, one of bool, int, float; got None",
        ),
        (
            [AGE, {"dtype": "int"}],
            r"columns: each must be a mapping such as .*, got \{'dtype': 'int'\}",
        ),
        (["age", "dose"], r"columns: each must be a mapping such as .*, got 'age'"),
        (
            [AGE, {"name": "dose", "dtype": "float", "mean": 0, "deviation": 0}],
            r"data\.standardise: 'dose' needs",
        ),
    ],
)
def test_columns_that_do_not_describe_the_inputs_are_refused(columns, words):
    x, y = np.zeros((3, 2)), np.arange(3) % 2
    with pytest.raises(DataError, match=words):
        data.DataSet("own", x, y, x, y, columns=tuple(columns))
    with pytest.raises(DataError, match=words):
        data.DataSet.from_arrays((x, y), (x, y), columns=tuple(columns))


def test_columns_do_not_describe_images_or_several_inputs():
    x, y = np.zeros((3, 2, 2)), np.arange(3) % 2
    for inputs in (x, (x, x)):
        with pytest.raises(
            DataError, match=r"columns: 1 is described, but the training inputs are "
        ):
            data.DataSet.from_arrays((inputs, y), (inputs, y), columns=(AGE,))


def test_a_column_named_like_the_intercept_is_refused():
    table = NUMBERS.drop(columns="site").rename(columns={"age": "(intercept)"})
    with pytest.raises(
        DataError, match=r"'\(intercept\)' is the name of a linear model's intercept: rename"
    ):
        data.load({"train": table, "test": table, "target": "out"})


def test_constants_of_the_public_test_rows_standardise_both_parts():
    train, test = NUMBERS.drop(columns="site"), NUMBERS.drop(columns="site")[:2]
    found = data.load({"train": train, "test": test, "target": "out", "standardise": "test"})
    assert found.columns == (
        {"name": "age", "dtype": "int", "mean": 56.5, "deviation": 4.5},
        {"name": "dose", "dtype": "float", "mean": 0.75, "deviation": 0.25},
        {"name": "smokes", "dtype": "bool"},
    )
    assert found.train_x.tolist() == [[-1, -1, 1], [1, 1, 0], [np.float32((40 - 56.5) / 4.5), 5, 1]]
    other = data.load(
        {"train": train.assign(age=0), "test": test, "target": "out", "standardise": "test"}
    )
    assert other.columns == found.columns


def test_constants_of_test_rows_need_rows_that_differ():
    table = NUMBERS.drop(columns="site").assign(dose=1.0)
    with pytest.raises(
        DataError,
        match=r"data\.standardise: all test rows have the same 'dose': leave it out of",
    ):
        data.load({"train": table, "test": table, "target": "out", "standardise": "test"})
    with pytest.raises(
        DataError, match=r"data\.standardise: must be 'test' or name columns, got 'train'"
    ):
        data.load({"train": table, "test": table, "target": "out", "standardise": "train"})


@pytest.mark.parametrize("constants", ["test", {"input_ids": (0, 1)}])
def test_tokens_are_not_standardised(constants):
    with pytest.raises(
        DataError, match=r"data\.standardise: is for columns of numbers, not for images, tokens"
    ):
        data.load({"train": TOKENS, "test": TOKENS, "length": 3, "standardise": constants})


def test_a_frame_of_constants_is_refused():
    table = NUMBERS.drop(columns="site")
    with pytest.raises(
        DataError, match=r"data\.standardise: must be 'test' or name columns, got .*age"
    ):
        data.load(
            {"train": table, "test": table, "target": "out", "standardise": table[["age"]].mean()}
        )
