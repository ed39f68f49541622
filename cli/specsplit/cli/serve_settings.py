"""Settings of `specsplit serve`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, field_validator
from pydantic_settings import SettingsConfigDict

from specsplit.core.settings import Settings
from specsplit.core.types import MAX_DRAFT

NO_REGISTRY = "none"


class ServeSettings(Settings):
    """Runs a registry, an n-gram drafter, verifiers and a gateway on this machine until Ctrl-C."""

    model_config = SettingsConfigDict(env_prefix="SPECSPLIT_SERVE_")

    model: str = "smollm2-135m-instruct"
    """Model to serve: the bundled one's name, a hub name, a folder, or a GGUF file."""
    revision: str | None = None
    """Revision of a hub model."""
    drafter: Literal["ngram"] = "ngram"
    """Proposer of drafts."""
    speculation_k: int = Field(default=4, ge=0, le=MAX_DRAFT)
    """Draft tokens per step for requests that do not say."""
    verifiers: int = Field(default=1, ge=1, le=64)
    """Replicas of the verifier; each loads the model."""
    redis_url: str | None = None
    """Registry of KV blocks, such as redis://127.0.0.1:6379 or unix:///path/to/socket; by default a Valkey of
    this stack's own; none does without."""
    trace_ratio: float | None = Field(default=None, ge=0, le=1)
    """Share of requests, of those whose caller does not decide, that are traced step by step; by default a
    tenth."""
    trace_content: bool = False
    """Record the text of prompts and outputs in traces."""
    host: str = Field(default="127.0.0.1", min_length=1)
    """Address on which the gateway listens; everything else listens on the loopback only."""
    port: int = Field(default=8000, ge=0, le=65535)
    """Port of the HTTP API; 0 takes a free one."""
    grpc_port: int = Field(default=50051, ge=0, le=65535)
    """Port of the gateway's gRPC API; 0 takes a free one."""
    dir: Path | None = None
    """Folder for stack.json, logs and traces; by default a fresh one under $XDG_STATE_HOME/specsplit."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of each verifier; by default the verifiers share the cores."""
    dtype: str | None = None
    """Type of the weights; by default the verifier's choice for the device."""
    device: str | None = None
    """Where the model runs: auto, cpu or cuda."""
    num_blocks: int | None = Field(default=None, ge=1)
    """KV blocks of each verifier; by default sized from the memory that is free."""
    max_sequence_tokens: int | None = Field(default=None, ge=1)
    """Longest sequence, prompt and output together; by default the model's context length."""
    drain_seconds: float = Field(default=10.0, ge=0)
    """Time that running requests get to finish after Ctrl-C."""

    @field_validator("redis_url")
    @classmethod
    def _is_a_redis_url(cls, url: str | None) -> str | None:
        if url is not None and url != NO_REGISTRY:
            from specsplit.core.registry.url import (
                checked,  # 0.4 s, which a stack's own registry does not need
            )

            return checked(url)
        return url
