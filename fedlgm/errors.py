"""Errors that the user can fix. The message of each states the error, its place, and the remedy.

The command line prints the message and exits with status 2. Any other exception is a bug and keeps
its traceback.
"""

from __future__ import annotations


class FedlgmError(Exception):
    """Base of every error caused by input rather than by a defect of fedlgm."""


class ConfigError(FedlgmError, ValueError):
    """A recipe key, an option or an argument that cannot be used."""


class DataError(FedlgmError):
    """A missing or damaged data set."""


class PrivacyError(FedlgmError):
    """A release that would break its claimed guarantee, or a budget that cannot be met."""


class LedgerError(FedlgmError):
    """A privacy ledger that is missing, damaged or belongs to another run."""


class RunError(FedlgmError):
    """A run folder that cannot be created, resumed or read, or a run that failed."""


class OtherObjectsError(RunError):
    """A run that was started with different Python objects from those given now."""


class DiskError(RunError):
    """Files of a run that cannot be written or read, for example because the disk is full."""


class DivergedError(RunError):
    """Training in which a value of the model became infinite or NaN. The results of the earlier
    rounds remain.

    Attributes:
        largest: pairs (client, l2 norm) of the last round's largest contributions, in descending
            order, if each contribution arrived separately; otherwise empty. The message omits them,
            because only the operator may know who took part.
    """

    largest: tuple[tuple[int, float], ...] = ()


class Notice(UserWarning):
    """A warning for the user who started a run, from any of its processes."""


class MemoryWarning(Notice):
    """A warning that work continues in smaller pieces for lack of memory."""


def out_of_memory(error: BaseException) -> bool:
    """Whether memory ran out, on the CPU or on a GPU. PyTorch's allocators raise different
    errors.
    """
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and "can't allocate memory" in str(error)
