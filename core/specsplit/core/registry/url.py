"""The address of a registry as a setting. Knows no connection."""

from __future__ import annotations

from typing import Annotated

import redis
from pydantic import AfterValidator


def checked(url: str) -> str:
    """The URL itself; ValueError for one that no connection can be made with."""
    try:
        pool = redis.ConnectionPool.from_url(url)
        pool.make_connection()
    except TypeError as error:  # an option of that name is not known
        raise ValueError(str(error).partition("() ")[2]) from error
    except redis.RedisError as error:  # an option has a wrong value
        raise ValueError(str(error)) from error
    if issubclass(pool.connection_class, redis.UnixDomainSocketConnection) and (
        "path" not in pool.connection_kwargs
    ):
        raise ValueError("a path must follow unix://")
    if pool.connection_kwargs.get("decode_responses"):
        raise ValueError("decode_responses: block hashes are not text")
    return url


RedisUrl = Annotated[str, AfterValidator(checked)]
"""redis://host:port/db, rediss://host:port or unix:///path, with what else redis-py reads from it."""
