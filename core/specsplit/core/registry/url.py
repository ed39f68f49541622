"""The address of a registry as a setting. Knows no connection."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator
from redis.connection import parse_url


def _checked(url: str) -> str:
    parse_url(url)  # type: ignore[no-untyped-call]  # raises ValueError with what it takes
    return url


RedisUrl = Annotated[str, AfterValidator(_checked)]
"""redis://host:port/db, rediss://host:port or unix:///path, with what else redis-py reads from it."""
