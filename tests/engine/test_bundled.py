"""The bundled model's folder: whole, usable without torch, and made once however many ask."""

import json
import os
import subprocess
import sys

import jinja2
import pytest
from tokenizers import Tokenizer

from specsplit.engine.bundled import DEFAULT_MODEL, ensure_bundled_model, resolve_model_path

PRINT_FOLDER = "from specsplit.engine.bundled import ensure_bundled_model; print(ensure_bundled_model())"


def test_other_names_pass_through():
    assert resolve_model_path("owner/some-model") == "owner/some-model"
    assert resolve_model_path("/a/file.gguf") == "/a/file.gguf"


@pytest.mark.model
def test_the_folder_serves_a_gateway_that_has_no_torch():
    folder = ensure_bundled_model()
    assert resolve_model_path(DEFAULT_MODEL) == str(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    template = jinja2.Template((folder / "chat_template.jinja").read_text())
    text = template.render(messages=[{"role": "user", "content": "Add 128."}], add_generation_prompt=True)
    assert text.endswith("<|im_start|>user\nAdd 128.<|im_end|>\n<|im_start|>assistant\n")
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert ids.count(1) == 3  # <|im_start|> of system, user and assistant
    assert ids.count(2) == 2  # <|im_end|>
    assert [tokenizer.decode([token]) for token in tokenizer.encode("128").ids] == ["1", "2", "8"]
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2
    assert json.loads((folder / "tokenizer_config.json").read_text())["model_max_length"] == 8192


@pytest.mark.slow
@pytest.mark.model
def test_two_processes_at_once_make_one_folder(tmp_path):
    environment = {**os.environ, "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", PRINT_FOLDER], env=environment, stdout=subprocess.PIPE, text=True
        )
        for _ in range(2)
    ]
    folders = {process.communicate(timeout=300)[0].strip() for process in processes}
    assert [process.returncode for process in processes] == [0, 0]
    assert len(folders) == 1
    kept = sorted(path.suffix for path in (tmp_path / "specsplit" / "models").iterdir())
    assert len([suffix for suffix in kept if suffix != ".lock"]) == 1
