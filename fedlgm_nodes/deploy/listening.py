"""Sentences about processes that a signal has stopped, such as the process that listens on a
socket.
"""

from __future__ import annotations

import contextlib
import socket
import struct
from pathlib import Path

import psutil


def stopped_fault(role: str, process: psutil.Process) -> str:
    """A sentence that says that a signal has stopped a process, and what to do; empty if the
    process is not stopped, or has ended.
    """
    with contextlib.suppress(psutil.Error):
        if process.status() == psutil.STATUS_STOPPED:
            return f"{role} (process {process.pid}) is stopped by a signal: `kill -CONT {process.pid}` continues it"
    return ""


def listener_fault(path: Path) -> str:
    """A sentence that says that a signal has stopped the process that listens on a socket, and what
    to do; empty if this is not so.
    """
    with (
        contextlib.suppress(OSError, psutil.Error),
        socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as link,
    ):
        link.settimeout(1.0)
        link.connect(str(path))
        pid, _, _ = struct.unpack(
            "3i", link.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
        )
        return stopped_fault("the release service", psutil.Process(pid))
    return ""
