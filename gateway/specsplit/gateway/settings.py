"""Settings of the gateway."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic_settings import NoDecode, SettingsConfigDict

from specsplit.core.registry.url import RedisUrl
from specsplit.core.serving import ListenSettings
from specsplit.core.types import MAX_DRAFT


def _split(value: object) -> object:
    """The parts of a flag or variable; a TOML file has a list."""
    return tuple(part.strip() for part in value.split(",")) if isinstance(value, str) else value


def _unique(addresses: tuple[str, ...]) -> tuple[str, ...]:
    if len(set(addresses)) < len(addresses):
        raise ValueError("must not name an address twice")
    return addresses


Address = Annotated[str, Field(pattern=r"^.+:[0-9]{1,5}$")]
"""host:port; an IPv6 host in brackets."""
Addresses = Annotated[
    tuple[Address, ...], NoDecode, BeforeValidator(_split), AfterValidator(_unique), Field(min_length=1)
]


class GatewaySettings(ListenSettings):
    """The gateway: owns each request's order, speculative length and life; serves HTTP and gRPC."""

    model_config = SettingsConfigDict(env_prefix="SPECSPLIT_GATEWAY_")

    port: int = Field(default=50051, ge=0, le=65535)
    """Port of the gRPC API; 0 takes a free one."""
    http_port: int = Field(default=8000, ge=0, le=65535)
    """Port of the HTTP API; 0 takes a free one."""
    verifiers: Addresses = ("127.0.0.1:50053",)
    """Addresses of the verifier replicas, separated by commas; all serve the same model."""
    drafter: Address | None = None
    """Address of the drafter; without one nothing is drafted."""
    tokenizer: Path
    """Folder with the model's tokenizer.json and chat template."""
    model_name: str | None = None
    """Name of the model in the APIs; by default the verifier's name for it."""
    speculation_k: int = Field(default=4, ge=0, le=MAX_DRAFT)
    """Draft tokens per step for requests that do not say."""
    max_prefill_tokens: int = Field(default=256, ge=1)
    """Most prompt tokens in one step; longer prompts are prefilled in chunks of this."""
    max_requests: int = Field(default=1024, ge=1)
    """Requests admitted at once, waiting ones included; more are answered 429."""
    max_body_bytes: int = Field(default=8 * 1024 * 1024, ge=1024)
    """Largest HTTP body that is read."""
    draft_timeout_ms: float = Field(default=50.0, gt=0)
    """Time a drafter has to answer before the step goes on without it."""
    step_timeout_seconds: float = Field(default=120.0, gt=0)
    """Time a verifier has to answer a step or an open; then its stream is given up and requests re-opened."""
    verifier_wait_seconds: float = Field(default=180.0, gt=0)
    """Time a request waits for a verifier to come back before it fails with 503."""
    redis_url: RedisUrl | None = None
    """The registry that verifiers publish their blocks to, such as redis://127.0.0.1:6379 or
    unix:///path/to/socket; without one, routing uses this gateway's own memory."""
    registry_timeout_ms: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    """Time that the registry has to answer before a request is routed without it."""
    trace_ratio: float = Field(default=0.1, ge=0, le=1)
    """Share of requests, of those whose caller does not decide, that are traced step by step; each request's
    own span, with all its totals, is kept always."""
    trace_content: bool = False
    """Record the text of prompts and outputs in traces."""
    shuffle_rows: bool = False
    """Test mode: compose each step's rows in random order; texts must not change."""
