"""Flower's SuperNode, asking the SuperLink more often while a run is going on.

`flower-supernode` pauses three seconds after every question that brings no message, and a second where a message is
announced a moment before its parts are there, so that a round of a small model is little else. Nothing but these
pauses is changed: connection, authentication and messages are Flower's, and it takes the arguments of
`flower-supernode`. The pause between questions is a tenth of the time since the last message, between 0.1 and 3 s.

The names that are replaced are private to Flower and may change with any version, so any other is refused.

    python -m clients.node.supernode --superlink 127.0.0.1:9092 --root-certificates ca.crt ...
"""

from __future__ import annotations

import sys
import time
from functools import partial
from importlib.metadata import version

FLOWER = "1.41."
SHORTEST_S, LONGEST_S, SHARE = 0.1, 3.0, 0.1


def after_silence(seconds: float, shortest: float = SHORTEST_S, longest: float = LONGEST_S) -> float:
    """Seconds to wait before the next question when the last message was so long ago.

    Example:
        >>> after_silence(5.0), after_silence(100.0)
        (0.5, 3.0)
    """
    return min(max(SHARE * seconds, shortest), longest)


class Pauses:
    """Takes the place of `time` in Flower's loop, which asks it for nothing but `sleep`."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Pause: three seconds are asked for when there was no message, less while one is being worked on."""
        now = time.monotonic()
        if seconds < LONGEST_S:
            self._last = now
            time.sleep(min(seconds, SHORTEST_S))
        else:
            time.sleep(after_silence(now - self._last))


def main() -> int:
    """Entry point; returns the exit status."""
    found = version("flwr")
    if not found.startswith(FLOWER):
        message = f"flwr {found} is installed; this changes private modules of {FLOWER}*: use flower-supernode, "
        print(f"error: {message}which only asks less often", file=sys.stderr)
        return 2
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    names = vars(start_client_internal)
    names["time"] = Pauses()
    names["pull_objects"] = partial(names["pull_objects"], initial_backoff=SHORTEST_S)
    flower_supernode()
    return 0


if __name__ == "__main__":
    sys.exit(main())
