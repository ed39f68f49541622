"""How the CPU kernels are compiled and where the results are kept.

numba's own cache looks at the time stamp of the file that holds a kernel, not at those of the kernels that it
calls, and would go on running an old callee. So the results lie in the user's cache, in a folder named after
the content of all kernel sources.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, cast

import numba


def _cache_dir() -> Path:
    digest = sha256()
    for source in sorted(Path(__file__).parent.glob("*.py")):
        digest.update(source.read_bytes())
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "specsplit" / "numba" / digest.hexdigest()[:16]


if not numba.config.CACHE_DIR:
    numba.config.CACHE_DIR = str(_cache_dir())


def jit(**options: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """numba.njit that releases the interpreter's lock and caches its result."""
    decorator = numba.njit(cache=True, nogil=True, **options)
    return cast(Callable[[Callable[..., Any]], Callable[..., Any]], decorator)
