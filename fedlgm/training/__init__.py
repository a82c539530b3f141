"""Local training of clients: trainers, models, tasks, and example-level training."""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
