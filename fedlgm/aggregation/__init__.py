"""Bounded sums of contributions, on the CPU and on accelerators, and the kernels that compute them."""
