"""Running stacks: one with the real model, one with the tiny random one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from stack_harness import Stack


@pytest.fixture(scope="session")
def real_stack(smollm2_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """SmolLM2; rows are composed in random order, on purpose."""
    stack = Stack(
        tmp_path_factory.mktemp("real"),
        *("--num-blocks", "1200"),
        env={"SPECSPLIT_GATEWAY_SHUFFLE_ROWS": "1"},
    )
    yield stack
    assert stack.stop() == 0


@pytest.fixture(scope="session")
def tiny_stack(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """A random model of 259 ids and a context of 256."""
    stack = Stack(
        tmp_path_factory.mktemp("tiny"),
        *("--model", str(tiny_model_dir), "--num-blocks", "256"),
        env={"SPECSPLIT_GATEWAY_SHUFFLE_ROWS": "1"},
    )
    yield stack
    assert stack.stop() == 0


@pytest.fixture(scope="session")
def two_verifiers(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    """The tiny model on two replicas, with the stack's own registry; requests are traced, steps are not."""
    stack = Stack(
        tmp_path_factory.mktemp("two"),
        *("--model", str(tiny_model_dir), "--num-blocks", "256", "--verifiers", "2", "--trace-ratio", "0"),
    )
    yield stack
    assert stack.stop() == 0
