"""Builds the core from the settings: the model, the size of its pool, the description. Knows no transport."""

from __future__ import annotations

import logging
from pathlib import Path

from specsplit.engine.model import PagedModel, load_model  # before torch: it sets how threads wait

import torch  # isort: skip

from specsplit.core.block_hash import namespace
from specsplit.core.digest import tokenizer_digest
from specsplit.core.errors import SettingsError
from specsplit.core.types import VerifierDescription, new_incarnation
from specsplit.engine.batch import BLOCK_SIZE
from specsplit.engine.bundled import resolve_model_path
from specsplit.verifier.checks import Limits
from specsplit.verifier.core import VerifierCore
from specsplit.verifier.device import Loaded
from specsplit.verifier.sampling import warm_up
from specsplit.verifier.settings import VerifierSettings

log = logging.getLogger(__name__)

_CPU_MEMORY_SHARE = 0.20
_CUDA_MEMORY_SHARE = 0.85


def load(settings: VerifierSettings) -> Loaded:
    device = settings.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = settings.dtype
    if dtype == "auto":
        dtype = "float32" if device == "cpu" else "bfloat16"
    model = load_model(
        settings.model, dtype=dtype, device=device, revision=settings.revision, num_threads=settings.threads
    )
    info = model.info
    num_blocks = settings.num_blocks or _num_blocks_that_fit(model, settings.verifiers_here)
    limits = Limits(
        vocab_size=info.vocab_size,
        num_blocks=num_blocks,
        max_sequence_tokens=_max_sequence_tokens(settings, model, num_blocks),
        max_step_tokens=settings.max_step_tokens,
        max_step_rows=settings.max_step_rows,
    )
    model.allocate_kv(num_blocks)
    tokenizer = Path(resolve_model_path(settings.model)) / "tokenizer.json"
    digest = tokenizer_digest(tokenizer) if tokenizer.is_file() else ""
    registry_namespace = namespace(
        model=settings.model,
        revision=info.revision,
        tokenizer_digest=digest,
        kv_dtype=info.dtype,
        block_size=BLOCK_SIZE,
    )
    warm_up(limits.vocab_size, model.device)
    description = VerifierDescription(
        model=settings.model,
        revision=info.revision,
        dtype=info.dtype,
        numerics=f"{model.device.type}-paged-v1",
        tokenizer_digest=digest,
        vocab_size=limits.vocab_size,
        max_sequence_tokens=limits.max_sequence_tokens,
        block_size=BLOCK_SIZE,
        num_blocks=num_blocks,
        max_step_tokens=limits.max_step_tokens,
        max_step_rows=limits.max_step_rows,
        incarnation=new_incarnation(),
        registry_namespace=registry_namespace,
        eos_token_ids=info.eos_token_ids,
    )
    log.info(
        "%s: %s on %s, %d blocks, sequences of up to %d tokens",
        settings.model,
        info.dtype,
        model.device,
        num_blocks,
        limits.max_sequence_tokens,
    )
    core = VerifierCore(
        model,
        limits,
        eos_token_ids=info.eos_token_ids,
        namespace=registry_namespace,
        is_tracked=settings.redis_url is not None,
    )
    return Loaded(core, description)


def _max_sequence_tokens(settings: VerifierSettings, model: PagedModel, num_blocks: int) -> int:
    """One sequence has to fit the pool alone, else the first in order could wait for ever."""
    possible = min(model.info.context_length, num_blocks * BLOCK_SIZE)
    wanted = settings.max_sequence_tokens
    if wanted is not None and wanted > possible:
        raise SettingsError(
            f"max_sequence_tokens: {wanted}, but model and {num_blocks} blocks allow {possible}",
            field="max_sequence_tokens",
        )
    return wanted or possible


def _num_blocks_that_fit(model: PagedModel, num_sharing: int) -> int:
    """Those that share the memory may start at once and all find it free."""
    if model.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(model.device)
        budget = free * _CUDA_MEMORY_SHARE
    else:
        budget = _available_bytes() * _CPU_MEMORY_SHARE
    budget /= num_sharing
    num_blocks = int(budget / model.info.kv_bytes_per_block)
    if num_blocks < 1:
        raise SettingsError(f"num_blocks: {budget:.0f} bytes do not hold one block", field="num_blocks")
    return num_blocks


def _available_bytes() -> int:
    """Memory that this process may still take: the machine's, or less where a control group limits it."""
    kib = next(
        line.split()[1]
        for line in Path("/proc/meminfo").read_text().splitlines()
        if line.startswith("MemAvailable:")
    )
    available = int(kib) * 1024
    limit, used = Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")
    if limit.is_file() and used.is_file() and limit.read_text().strip() != "max":
        available = min(available, int(limit.read_text()) - int(used.read_text()))
    return max(available, 0)
