"""Text: a small file in the format of Debian's bible.data always, the real one where it is
installed."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from bible import VERSES, bible_bytes

from fedlgm import data
from fedlgm.data import sources, text
from fedlgm.errors import DataError

REAL = Path("/usr/lib/bible.data")


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FEDLGM_DATA", str(tmp_path / "store"))
    monkeypatch.setenv("FEDLGM_OFFLINE", "1")


def test_chapters_of_a_small_file(tmp_path: Path) -> None:
    (tmp_path / "bible.data").write_bytes(bible_bytes())
    verses = [verse.split(" ", 1)[1] for verse in VERSES]
    assert text.read_bible(tmp_path / "bible.data") == [
        ("Ge", 1, f"{verses[0]}\n{verses[1]}"), ("Ge", 2, verses[2]), ("1Jo", 1, verses[3]),
    ]  # fmt: skip
    books = data.load("bible-kjv", tmp_path)
    chapters = data.load("bible-kjv-chapters", tmp_path)
    assert books.shape == (text.LENGTH,)
    assert books.classes == chapters.classes == len(text.ALPHABET) == 64
    assert np.unique(books.train_user).tolist() == [0, 1]
    assert np.unique(chapters.train_user).tolist() == [0, 1, 2]
    assert text.decode(books.train_x[0]) == verses[0][: text.LENGTH]
    assert text.decode(books.train_y[0]) == verses[0][1 : text.LENGTH + 1]
    clients = data.divide(chapters, 3, "natural")
    assert text.decode(chapters.train_x[clients[1][0]]) == verses[2][: text.LENGTH]


def damaged() -> dict[str, tuple[bytes, str]]:
    whole = bible_bytes()
    return {
        "another file": (b"\x89PNG" + whole, r"is not a text of Debian's package bible-kjv-text"),
        "no table": (whole[:95], r"is damaged: its table of \d+ windows"),
        "bytes lost": (whole[:120], r"is damaged: its table of \d+ windows does not fit"),
        "bytes changed": (whole[:-40] + b"\xff" * 40, r"is damaged: .*corrupt"),
        "no verses": (bible_bytes(("nothing here",)), r"holds no verses"),
    }


@pytest.mark.parametrize("case", damaged())
def test_damaged_files_are_refused(case: str, tmp_path: Path) -> None:
    content, message = damaged()[case]
    (tmp_path / "bible.data").write_bytes(content)
    with pytest.raises(DataError, match=message) as caught:
        data.load("bible-kjv", tmp_path)
    assert str(tmp_path / "bible.data") in str(caught.value)


def test_a_missing_text_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    elsewhere = replace(sources.FILE_SETS["bible-kjv"], debian=tmp_path)
    monkeypatch.setitem(sources.FILE_SETS, "bible-kjv", elsewhere)
    with pytest.raises(DataError, match="install Debian's package bible-kjv-text"):
        data.load("bible-kjv")


def test_the_real_text() -> None:
    if not REAL.exists():
        pytest.skip("needs Debian's package bible-kjv-text")
    books, chapters = data.load("bible-kjv"), data.load("bible-kjv-chapters")
    assert len(np.unique(books.train_user)) == 66
    assert len(np.unique(chapters.train_user)) == 1189
    assert text.decode(books.train_x[0]) == "In the beginning God created the"
    assert text.decode(books.train_y[0]) == "n the beginning God created the "
    assert (len(books.train_y) + len(books.test_y)) * text.LENGTH > 4_000_000
    read = text.read_bible(REAL)
    assert set("".join(chapter for _, _, chapter in read)) <= set(text.ALPHABET)
    assert read[-1][2].endswith("The grace of our Lord Jesus Christ be with you all. Amen.")


def test_characters_and_numbers() -> None:
    assert text.encode("ab\nA", "ab\n").tolist() == [0, 1, 2]
    assert text.decode(text.encode("Zoë: ¿what?")) == "Zo: what?"
    assert text.encode("").tolist() == []
    assert len(set(text.ALPHABET)) == 64


def test_windows_cover_each_text_once_and_never_two_users() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    train, test = text.windows({"first": letters, "none": "ab", "last": letters[::-1]}, length=5)
    assert train.user is not None
    assert train.user.tolist() == [0] * 5 + [2] * 4
    assert text.decode(train.x[1]) == "fghij"
    assert text.decode(train.y[1]) == "ghijk"
    assert text.decode(test.x[0]) == "fedcb"
    own = text.next_character({"first": letters, "last": letters[::-1]}, length=5, name="letters")
    assert (own.name, own.classes, own.shape) == ("letters", 64, (5,))


@pytest.mark.parametrize(
    ("texts", "length", "alphabet", "message"),
    [
        ({"a": "abc"}, 5, text.ALPHABET, r"the texts hold 0 windows of 5 characters"),
        ({"a": "abc" * 9}, 5, "abca", r"names a character twice"),
    ],
)
def test_texts_that_are_too_short_are_refused(
    texts: dict[str, str], length: int, alphabet: str, message: str
) -> None:
    with pytest.raises(DataError, match=message):
        text.windows(texts, length, alphabet)
