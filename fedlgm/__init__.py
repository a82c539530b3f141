"""fedlgm: layer-wise differential privacy for federated learning, with one accountant for all
mechanisms.

Names are loaded when they are first used, so `import fedlgm` takes almost no time.

>>> import fedlgm
>>> fedlgm.mechanisms.get("snr-consistent", bound=0.5).bound
0.5
"""

import lazy_loader

from fedlgm import moved

__version__ = "0.1.0"

moved.install()
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
