"""A small text in the format of Debian's bible.data."""

from __future__ import annotations

import numpy as np

VERSES = (
    "Ge1:1 In the beginning God created the heaven and the earth.",
    "Ge1:2 And the earth was without form, and void; and darkness was upon the face of the deep.",
    "Ge2:1 Thus the heavens and the earth were finished, and all the host of them.",
    (
        "1Jo1:1 That which was from the beginning, which we have heard, which we have seen with "
        "our eyes."
    ),
)
WINDOW = 128  # bytes; few enough for compress(1) to use codes of nine bits only


def packed(content: bytes) -> bytes:
    """Text as compress(1) writes it (LZW), without the header."""
    table = {bytes([i]): i for i in range(256)}
    bits, count, prefix = 0, 0, b""
    for byte in [*content, None]:
        longer = prefix if byte is None else prefix + bytes([byte])
        if byte is not None and longer in table:
            prefix = longer
            continue
        bits |= table[prefix] << count
        count += 9
        if byte is not None:
            table[longer] = 257 + len(table) - 256
            prefix = bytes([byte])
    return bits.to_bytes(-(-count // 8), "little")


def bible_bytes(verses: tuple[str, ...] = VERSES) -> bytes:
    """The file that holds these verses."""
    content = ("Holy Bible\n" + "".join(f"{verse}\n" for verse in verses)).encode()
    windows = [packed(content[start : start + WINDOW]) for start in range(0, len(content), WINDOW)]
    start = 92 + 4 * len(windows)
    starts = np.cumsum([start, *map(len, windows[:-1])]).astype(">u4").tobytes()
    sizes = WINDOW.to_bytes(4, "big") + len(windows).to_bytes(4, "big")
    return b"EC02Compressed Data File".ljust(84, b"\0") + sizes + starts + b"".join(windows)
