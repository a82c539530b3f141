"""Flower's SuperNode, with more frequent polls while a run is active, and more frequent heartbeats.

`flower-supernode` pauses three seconds after every poll without a message, and one second if a
message is announced before its parts have arrived, so a round of a small model consists mostly of
pauses. If a SuperNode was killed, a SuperLink refuses it until its heartbeats have been missing for
a minute. With this program, the SuperLink refuses it for only half a minute. Connection,
authentication, messages and arguments are those of `flower-supernode`. The pause between polls is a
tenth of the time since the last message, between 0.1 and 3 s, and longer than the SuperLink takes
to answer a poll. Each poll costs a SuperLink several milliseconds, and polls of many nodes would
delay messages.

The names that this module replaces are private to Flower and may change with any version, so other
versions are refused.

    python -m fedlgm_nodes.service.supernode --superlink 127.0.0.1:9092 --root-certificates ca.crt
    ...
"""

from __future__ import annotations

import sys
import time

from clients.flower_private import SOON_S, run_supernode, version_problem
from fedlgm_nodes.protocol.messages import pause_after

LONGEST_S = 3.0
_REPLY_S = 0.05  # seconds between looks for the reply in this process's memory
_NEVER_CONNECTED = (
    "this SuperNode ended before it was connected; a SuperLink refuses (401) a key that is not "
    "registered, and a machine whose clock is more than 5 seconds ahead of the server's or 5 "
    "minutes behind"
)
"""Error message for this case, in which Flower itself says only that it terminated gracefully."""
_SHARE = 10  # shortest pause after a poll, as a multiple of the poll's duration


class Pauses:
    """A replacement for `time` in Flower's loop, which uses only `sleep`."""

    def __init__(self) -> None:
        self.polled = False  # whether Flower has ever paused, which it does once it is connected
        self._last = time.monotonic()
        self._polling: float | None = None  # time at which the current poll began

    def sleep(self, seconds: float) -> None:
        """Pause for at most `seconds`. Flower requests three seconds if there was no message, and
        less while a message is being processed.
        """
        now, self.polled = time.monotonic(), True
        if seconds < LONGEST_S:
            self._last, self._polling = now, None
            time.sleep(min(seconds, _REPLY_S))
            return
        took = now - self._polling if self._polling is not None else 0.0
        time.sleep(
            min(max(pause_after(now - self._last, SOON_S, LONGEST_S), _SHARE * took), LONGEST_S)
        )
        self._polling = time.monotonic()


def main() -> int:
    """Entry point; returns the exit status."""
    if why := version_problem("use flower-supernode, which only asks less often"):
        print(f"error: {why}", file=sys.stderr)
        return 2
    pauses, status = Pauses(), 1  # Flower returns only after an error, which it has logged
    try:
        run_supernode(pauses)
    except SystemExit as ended:
        status = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    if pauses.polled:
        return status
    print(f"error: {_NEVER_CONNECTED}", file=sys.stderr)
    return status or 1


if __name__ == "__main__":
    sys.exit(main())
