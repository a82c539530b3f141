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

from clients.flower_private import SOON_S, look_again_soon, unsupported
from fedlgm.node_protocol import pause_after

LONGEST_S = 3.0


class Pauses:
    """Takes the place of `time` in Flower's loop, which asks it for nothing but `sleep`."""

    def __init__(self) -> None:
        self._last = time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Pause: three seconds are asked for when there was no message, less while one is being worked on."""
        now = time.monotonic()
        if seconds < LONGEST_S:
            self._last = now
            time.sleep(min(seconds, SOON_S))
        else:
            time.sleep(pause_after(now - self._last, SOON_S, LONGEST_S))


def main() -> int:
    """Entry point; returns the exit status."""
    if why := unsupported("use flower-supernode, which only asks less often"):
        print(f"error: {why}", file=sys.stderr)
        return 2
    from flwr.supernode import start_client_internal
    from flwr.supernode.cli import flower_supernode

    vars(start_client_internal)["time"] = Pauses()
    look_again_soon(start_client_internal)
    flower_supernode()
    return 0


if __name__ == "__main__":
    sys.exit(main())
