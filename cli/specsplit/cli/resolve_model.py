"""Finds a model's files before the services start, in a process of its own. Loads no weights.

    python -m specsplit.cli.resolve_model MODEL REVISION FOLDER

writes FOLDER/model.json: {"tokenizer": a folder that holds tokenizer.json}. The bundled model is unpacked
here, once. Some models need transformers for it, which `specsplit serve` itself never imports.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from specsplit.core.errors import SpecsplitError
from specsplit.engine.bundled import resolve_model_path


def main(model: str, revision: str, folder: Path) -> None:
    try:
        tokenizer = _tokenizer_folder(resolve_model_path(model), revision or None, folder)
    except SpecsplitError as error:
        print(f"specsplit serve: error: {error.message}", file=sys.stderr)
        raise SystemExit(1) from None
    (folder / "model.json").write_text(json.dumps({"tokenizer": str(tokenizer)}))


def _tokenizer_folder(path: str, revision: str | None, folder: Path) -> Path:
    """The model's own folder where it has a tokenizer.json, else one written from what transformers finds."""
    local = Path(path).expanduser()
    if (local / "tokenizer.json").is_file():
        return local.resolve()
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
    made = folder / "tokenizer"
    tokenizer.save_pretrained(made)
    if not (made / "tokenizer.json").is_file():
        raise ModelLoadError(f"{path} has no fast tokenizer (tokenizer.json)", field="model")
    return made


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
