"""How torch's and numba's threads share the cores. Import before torch: libgomp reads its variables once."""

from __future__ import annotations

import os

# A barrier that spins for long keeps a core from the machine's other services; one that sleeps at once pays a
# wake-up for each of the hundreds of operations of a step: spin for about the gap between two, then sleep.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")
os.environ.setdefault("GOMP_SPINCOUNT", "50000")


def set_num_threads(num_threads: int | None) -> None:
    """Both pools get `num_threads`; None leaves their defaults (the cores, or OMP_NUM_THREADS)."""
    import numba
    import torch

    if num_threads is None:
        num_threads = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    numba.set_num_threads(min(num_threads, numba.config.NUMBA_NUM_THREADS))
