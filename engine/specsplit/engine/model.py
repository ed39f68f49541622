"""Runs a causal LM over paged KV: ragged rows in, logits out. Knows no requests, sampling or block owners."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from specsplit.engine.threads import set_num_threads  # before torch

import torch  # isort: skip
from torch import Tensor

from specsplit.core.errors import SettingsError
from specsplit.engine import loading
from specsplit.engine.attention import LayerSpec, PagedBatch, PagedKV
from specsplit.engine.batch import BLOCK_SIZE, Row
from specsplit.engine.bundled import resolve_model_path
from specsplit.engine.flat import run_flat
from specsplit.engine.linear import use_output_major
from specsplit.engine.self_check import canary, check_paged, probe_layers
from specsplit.kernels.paged_attention import PagedRows


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What others must know of a loaded model."""

    name: str
    revision: str  # hub commit, or digest of local files
    vocab_size: int  # columns of the logits
    context_length: int  # most positions a row may reach
    num_layers: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    kv_bytes_per_block: int  # all layers, K and V, 16 positions


class PagedModel:
    """A model and its KV pools. One thread at a time."""

    def __init__(self, model: Any, info: ModelInfo, specs: list[LayerSpec]) -> None:
        self.info = info
        self._model = model
        self._specs = specs
        self._kv: PagedKV | None = None

    @property
    def device(self) -> torch.device:
        return self._model.device  # type: ignore[no-any-return]

    def allocate_kv(self, num_blocks: int) -> None:
        """Pools of `num_blocks` blocks, replacing those there were. Blocks are numbered from 0."""
        self._kv = None  # the old pools go first
        is_poisoned = os.environ.get("SPECSPLIT_POISON") == "1"
        self._kv = PagedKV(
            self._specs, num_blocks, dtype=self._model.dtype, device=self.device, is_poisoned=is_poisoned
        )

    def forward(self, rows: Sequence[Row]) -> Tensor:
        """Writes the rows' KV; returns [sum(num_logits), vocab] float32 on the device, rows in order."""
        assert self._kv is not None, "allocate_kv comes first"
        token_ids: list[int] = []
        wanted: list[int] = []
        for row in rows:
            count = len(row.token_ids)
            end = row.start + count
            assert count > 0, row
            assert row.start >= 0, row
            assert 0 <= row.num_logits <= count, row
            assert end <= self.info.context_length, f"position {end} is past the context length"
            assert len(row.block_table) * BLOCK_SIZE >= end, (
                f"{len(row.block_table)} blocks cannot hold {end} positions"
            )
            token_ids.extend(row.token_ids)
            wanted.extend(range(len(token_ids) - row.num_logits, len(token_ids)))
        paged = PagedRows(
            [row.start for row in rows],
            [len(row.token_ids) for row in rows],
            [row.block_table for row in rows],
        )
        assert 0 <= paged.tables.min() <= paged.tables.max() < self._kv.num_blocks, "no such block"
        positions = torch.from_numpy(paged.positions)
        return run_flat(self._model, token_ids, positions, wanted, PagedBatch(self._kv, paged))


def load_model(
    name: str, *, dtype: str, device: str, revision: str | None = None, num_threads: int | None = None
) -> PagedModel:
    """Loads, learns each layer's attention, and checks the paged path against the model's own.

    `name` is a hub name, a local folder, a GGUF file or the bundled default.
    """
    if dtype not in loading.DTYPES:
        raise SettingsError(f"dtype {dtype} is none of {', '.join(loading.DTYPES)}", field="dtype")
    set_num_threads(num_threads)
    source = loading.find_source(resolve_model_path(name))
    config = loading.read_config(source, revision)
    loading.refuse_unsupported(config)
    length = loading.context_length(config)
    model: Any = loading.read_model(source, config, revision, dtype, device)

    specs = probe_layers(model)
    tokens, expected = canary(model, specs, length)
    if device == "cpu":
        use_output_major(model)
    check_paged(model, specs, tokens, expected)

    position_values = sum(spec.num_kv_heads * (spec.key_dim + spec.value_dim) for spec in specs)
    info = ModelInfo(
        name=name,
        revision=loading.content_revision(source, config),
        vocab_size=expected.shape[1],
        context_length=length,
        num_layers=len(specs),
        eos_token_ids=loading.eos_token_ids(model.generation_config, config),
        dtype=dtype,
        kv_bytes_per_block=BLOCK_SIZE * position_values * model.dtype.itemsize,
    )
    return PagedModel(model, info, specs)
