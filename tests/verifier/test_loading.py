"""How much memory a verifier takes for its blocks."""

from __future__ import annotations

from pathlib import Path

from specsplit.verifier.loading import load
from specsplit.verifier.settings import VerifierSettings


def num_blocks(model: Path, verifiers_here: int) -> int:
    settings = VerifierSettings(model=str(model), device="cpu", verifiers_here=verifiers_here)
    return load(settings).description.num_blocks


def test_verifiers_on_one_machine_share_its_memory(tiny_model_dir: Path) -> None:
    """They may start at once, and each would find all of it free. What is free changes meanwhile."""
    few, many = num_blocks(tiny_model_dir, 16), num_blocks(tiny_model_dir, 64)
    assert 3 < few / many < 5
