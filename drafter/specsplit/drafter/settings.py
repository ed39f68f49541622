"""Settings of a drafter process; knows nothing of how they are used."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, ValidationInfo, field_validator
from pydantic_settings import SettingsConfigDict

from specsplit.core.serving import ListenSettings


class DrafterSettings(ListenSettings):
    """Proposes continuations over gRPC."""

    model_config = SettingsConfigDict(env_prefix="SPECSPLIT_DRAFTER_")

    port: int = Field(50052, ge=0, le=65535)
    """Port to listen on; 0 takes a free one."""
    metrics_port: int = Field(9052, ge=0, le=65535)
    """Port of /metrics over HTTP; 0 takes a free one."""
    proposer: Literal["ngram"] = "ngram"
    """How drafts are made."""
    min_n: int = Field(2, ge=1)
    """Shortest suffix that is looked up. 1 drafts almost everywhere, at half the acceptance rate."""
    max_n: int = Field(5, le=16)
    """Longest suffix that is looked up; each length costs memory and time per token."""
    idle_seconds: float = Field(600.0, gt=0, allow_inf_nan=False)
    """A request that asks for no draft for this long is forgotten."""
    max_context_tokens: int = Field(524_288, ge=1)
    """Tokens held for all requests together (at most 600 bytes each); least recently used go first."""

    @field_validator("max_n")
    @classmethod
    def _max_n_at_least_min_n(cls, max_n: int, info: ValidationInfo) -> int:
        min_n = info.data.get("min_n", 1)
        if max_n < min_n:
            raise ValueError(f"must be at least min_n ({min_n})")
        return max_n
