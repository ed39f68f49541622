"""A registry's address: what is accepted makes connections, what is refused says why."""

from __future__ import annotations

import pytest
from pydantic_settings import SettingsConfigDict

from specsplit.core.errors import SettingsError
from specsplit.core.registry.url import RedisUrl
from specsplit.core.registry.writer import connect
from specsplit.core.settings import Settings, load_settings


class ExampleSettings(Settings):
    model_config = SettingsConfigDict(env_prefix="EXAMPLE_")

    redis_url: RedisUrl | None = None


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:6379",
        "redis://localhost",
        "redis://user:p%40ss@[::1]:6380/2",
        "rediss://example.org:6380",
        "unix:///run/redis.sock",
        "unix:///run/with%20space.sock?db=1",
        "redis://localhost?protocol=3",
    ],
)
def test_accepted(url: str) -> None:
    assert load_settings(ExampleSettings, ["--redis-url", url], prog="example").redis_url == url
    connect(url, timeout_seconds=1).close()


@pytest.mark.parametrize(
    ("url", "reason"),
    [
        ("localhost:6379", "must specify"),
        ("http://localhost:6379", "must specify"),
        ("redis://localhost:99999", "Port out of range"),
        ("redis://localhost:port", "Port could not be cast"),
        ("redis://localhost?db=x", "db"),
        ("redis://localhost?socket_timeout=soon", "socket_timeout"),
        ("redis://localhost?colour=red", "'colour'"),
        ("redis://localhost?protocol=9", "protocol"),
        ("redis://localhost?decode_responses=True", "decode_responses"),
        ("rediss://localhost?ssl_cert_reqs=maybe", "maybe"),
        ("unix://", "path"),
    ],
)
def test_refused(url: str, reason: str) -> None:
    with pytest.raises(SettingsError) as raised:
        load_settings(ExampleSettings, [f"--redis-url={url}"], prog="example")
    assert raised.value.field == "redis_url"
    assert raised.value.message.startswith("redis_url: ")
    assert reason in raised.value.message
