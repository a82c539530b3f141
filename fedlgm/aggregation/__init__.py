"""Bounded sums of contributions, on the CPU and on accelerators, and the kernels that compute them.

A release takes three steps: `sum_on(plan, device)` makes an empty sum on the device of the updates,
`add` bounds the updates and adds them, and `fedlgm.noise.release.release` adds the plan's noise.
"""

import lazy_loader

__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
