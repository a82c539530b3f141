"""Accounting, guarantees and the durable ledger.

Names are loaded when they are first used: the accountant takes a second to import, and processes
that only train do not need it.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
