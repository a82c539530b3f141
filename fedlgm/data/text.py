"""Texts as sequences of characters, for the task "next-token"."""

from __future__ import annotations

import re
import string
import subprocess
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from fedlgm.data.dataset import DataSet
from fedlgm.data.formats import Samples
from fedlgm.errors import DataError
from fedlgm.files import explain_failure

ALPHABET = "\n !'(),-.:;?" + string.ascii_uppercase + string.ascii_lowercase
"""The 64 characters of the bundled texts. The alphabet is a constant, because an alphabet derived
from private texts would reveal information about them.
"""
LENGTH = 32
_TEST_EVERY = 10
_VERSE = re.compile(r"(\d?[A-Za-z]+)(\d+):\d+ (.+)")
_LZW = b"\x1f\x9d\x90"  # header of compress(1): codes of up to 16 bits, a clearable table


def encode(text: str, alphabet: str = ALPHABET) -> np.ndarray:
    """Convert a text to the numbers of its characters, int64 [characters]. Characters outside the
    alphabet are dropped.

    >>> decode(encode("In the beginning § God"))
    'In the beginning  God'
    """
    numbers = {character: number for number, character in enumerate(alphabet)}
    return np.array(
        [numbers[character] for character in text if character in numbers], dtype=np.int64
    )


def decode(tokens: np.ndarray) -> str:
    """Convert the numbers [characters] that `encode` returns for `ALPHABET` back to a text.

    Example:
        >>> decode(encode("Amen."))
        'Amen.'
    """
    return "".join(ALPHABET[int(token)] for token in tokens)


def windows(
    texts: Mapping[object, str], length: int = LENGTH, alphabet: str = ALPHABET
) -> tuple[Samples, Samples]:
    """Cut texts into training and test examples, which are windows of `length` characters. The
    target of each character is the next character.

    The windows of a text do not overlap. By a fixed, public rule, every tenth window is a test
    example, counted over all texts; if there are fewer than ten windows, the last window is the
    test example. The remaining characters at the end of a text are not used.

    Args:
        texts: text of each user. The users are numbered 0, 1, ... in the order of the mapping.
        length: number of characters in a window.
        alphabet: the characters, all different, in the order of their numbers.

    Raises:
        DataError: there are fewer than two windows in all, or a character occurs twice in the
            alphabet.

    Example:
        >>> train, test = windows({"mary": "ab" * 25}, length=4)  # 12 windows, one of them for the test
        >>> len(train.y), len(test.y), decode(train.x[0]), decode(train.y[0])
        (11, 1, 'abab', 'baba')
    """
    if len(set(alphabet)) < len(alphabet):
        raise DataError("the alphabet names a character twice")
    cut, users = [np.zeros((0, length + 1), dtype=np.int64)], list[int]()
    for number, text in enumerate(texts.values()):
        tokens = encode(text, alphabet)
        if len(tokens) > length:
            cut.append(sliding_window_view(tokens, length + 1)[::length])
            users += [number] * len(cut[-1])
    rows, user = np.concatenate(cut), np.array(users)
    if len(rows) < 2:
        raise DataError(
            f"the texts hold {len(rows)} windows of {length} characters: give longer texts or "
            "shorter windows"
        )
    test = np.arange(len(rows)) % _TEST_EVERY == min(_TEST_EVERY, len(rows)) - 1
    x, y = rows[:, :-1], rows[:, 1:]
    return Samples(x[~test], y[~test], user[~test]), Samples(x[test], y[test])


def next_character(
    texts: Mapping[object, str], length: int = LENGTH, alphabet: str = ALPHABET, name: str = "text"
) -> DataSet:
    """Make a data set from users' texts for the task "next-token". The arguments and errors are the
    same as for `windows`; `name` is the name of the set.

    Example:
        >>> data = next_character({"mary": "to be or not", "percy": "to be a bee"}, length=5)
        >>> data.train_user.tolist(), data.classes
        ([0, 0, 1], 64)
    """
    train, test = windows(texts, length, alphabet)
    return DataSet(name, train.x, train.y, test.x, test.y, len(alphabet), train.user)


def read_bible(path: Path) -> list[tuple[str, int, str]]:
    """Read the chapters (book, number, text) of Debian's file bible.data. Each line of the text is
    one verse.

    The file, of Chip Chapin's "Bible Retrieval System", begins with a title of 84 bytes, the size
    of a window, the number of windows (both big-endian) and the start of each window. The windows
    follow: pieces of text that are packed by compress(1), without its header. This library does not
    contain the file; `data.load("bible-kjv")` finds it (see docs/how-to/text.md).

    Raises:
        DataError: the file has a different format, or is damaged.
    """
    try:
        content = path.read_bytes()
    except OSError as error:
        raise DataError(explain_failure(f"{path} cannot be read", error)) from error
    if not content.startswith(b"EC02Compressed") or len(content) < 92:
        raise DataError(f"{path} is not a text of Debian's package bible-kjv-text")
    count = int.from_bytes(content[88:92], "big")
    table = content[92 : 92 + 4 * count]
    starts = np.frombuffer(table, dtype=">u4").tolist() if len(table) == 4 * count else []
    if not starts or sorted(starts) != starts or starts[-1] > len(content):
        raise DataError(
            f"{path} is damaged: its table of {count} windows does not fit into the file"
        )
    text = b"".join(
        _unpack(path, content[start:end])
        for start, end in zip(starts, [*starts[1:], len(content)], strict=True)
    )
    chapters: dict[tuple[str, int], list[str]] = {}
    for line in text.decode("latin-1").splitlines():
        verse = _VERSE.fullmatch(line)
        if verse is not None:
            chapters.setdefault((verse[1], int(verse[2])), []).append(verse[3])
    if not chapters:
        raise DataError(f"{path} holds no verses")
    return [(book, number, "\n".join(verses)) for (book, number), verses in chapters.items()]


def _unpack(path: Path, window: bytes) -> bytes:
    """Unpack one window with the program gzip, which reads the format of compress(1) and is part of
    every Debian system.
    """
    try:
        done = subprocess.run(["gzip", "-dc"], input=_LZW + window, capture_output=True, check=True)
    except FileNotFoundError as error:
        raise DataError(f"{path}: the program gzip is needed to unpack it") from error
    except subprocess.CalledProcessError as error:
        raise DataError(
            f"{path} is damaged: {error.stderr.decode(errors='replace').strip()}"
        ) from error
    return done.stdout
