"""Settings of the verifier. Imports nothing of the engine, so that reading them is quick."""

from __future__ import annotations

from pydantic import Field
from pydantic_settings import SettingsConfigDict

from specsplit.core.registry.url import RedisUrl
from specsplit.core.serving import ListenSettings


class VerifierSettings(ListenSettings):
    """The verifier: runs the target model and decides about drafts."""

    model_config = SettingsConfigDict(env_prefix="SPECSPLIT_VERIFIER_")

    port: int = Field(default=50053, ge=0, le=65535)
    """Port of the gRPC API; 0 takes a free one."""
    metrics_port: int = Field(default=9053, ge=0, le=65535)
    """Port of /metrics over HTTP; 0 takes a free one."""
    redis_url: RedisUrl | None = None
    """The registry to publish KV blocks to, such as redis://127.0.0.1:6379 or unix:///path/to/socket."""
    advertise: str | None = None
    """Address under which the registry names this replica; by default the one it listens on."""
    registry_ttl_seconds: float = Field(default=15.0, ge=1, allow_inf_nan=False)
    """Time after which a replica that sends no heartbeat vanishes from the registry."""
    model: str = "smollm2-135m-instruct"
    """Hub name, local folder, GGUF file, or the bundled default."""
    revision: str | None = None
    """Revision of a hub model."""
    dtype: str = "auto"
    """float32, bfloat16, float16, or auto: float32 on CPU and bfloat16 on CUDA."""
    device: str = "auto"
    """cpu, cuda, or auto: CUDA where there is one."""
    num_blocks: int | None = Field(default=None, ge=1)
    """KV blocks of 16 tokens; by default 20 % of the free memory, on CUDA 85 % of what the model leaves."""
    verifiers_here: int = Field(default=1, ge=1)
    """Verifiers on this machine, this one included: each takes its part of the memory for blocks."""
    max_sequence_tokens: int | None = Field(default=None, ge=2)
    """Longest sequence, prompt and output together; by default what the model and the blocks allow."""
    max_step_tokens: int = Field(default=2048, ge=1)
    """Most tokens of one step, all rows together."""
    max_step_rows: int = Field(default=256, ge=1)
    """Most rows of one step."""
    max_steps_in_flight: int = Field(default=2, ge=1)
    """Steps that one stream may have in flight."""
    threads: int | None = Field(default=None, ge=1)
    """Threads of the model; by default all cores, or OMP_NUM_THREADS."""
