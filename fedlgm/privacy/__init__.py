"""Accounting, guarantees and the durable ledger.

Names load on first use, because processes that only train need no accountant, which takes a second
to import.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
