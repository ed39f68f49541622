"""Finds a model's files before the services start, in a process of its own. Loads no weights.

    python -m specsplit.cli.resolve_model MODEL REVISION FOLDER

leaves FOLDER/tokenizer, a folder (or a link to one) that holds tokenizer.json. The bundled model is unpacked
here, once. Some models need transformers for it, which `specsplit serve` itself never imports.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

from specsplit.core.errors import SpecsplitError
from specsplit.engine.bundled import resolve_model_path

PROG = "specsplit serve"


def main(model: str, revision: str, folder: Path) -> None:
    target = folder / "tokenizer"
    if target.is_symlink():
        target.unlink()
    shutil.rmtree(target, ignore_errors=True)  # of another model
    try:
        _provide_tokenizer(resolve_model_path(model), revision or None, target)
    except SpecsplitError as error:
        print(f"{PROG}: error: {error.message}", file=sys.stderr)
        raise SystemExit(1) from None


def _provide_tokenizer(path: str, revision: str | None, target: Path) -> None:
    """A link to the model's own folder where it has a tokenizer.json, else what transformers finds."""
    local = Path(path).expanduser()
    if (local / "tokenizer.json").is_file():
        target.symlink_to(local.resolve())
        return
    from transformers import AutoTokenizer

    from specsplit.engine.errors import ModelLoadError
    from specsplit.engine.loading import find_source

    source = find_source(path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            source.folder, revision=revision or "main", **source.options
        )
    except (OSError, ValueError) as error:
        raise ModelLoadError(f"cannot read the tokenizer of {path}: {error}", field="model") from error
    tokenizer.save_pretrained(target)
    if not (target / "tokenizer.json").is_file():
        raise ModelLoadError(f"{path} has no fast tokenizer (tokenizer.json)", field="model")


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
