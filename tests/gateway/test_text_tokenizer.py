"""The model's tokenizer and chat template as the gateway reads them."""

from __future__ import annotations

import json
from pathlib import Path
from shutil import copy

import pytest

from specsplit.core.digest import tokenizer_digest
from specsplit.core.errors import InvalidRequest, SettingsError
from specsplit.core.types import ChatMessage
from specsplit.gateway.text.tokenizer import Tokenizer

HELLO = [ChatMessage("system", "Be brief."), ChatMessage("user", "<b>hé</b>")]


def folder_with(tmp_path: Path, source: Path, *, template: str | None, config: object = None) -> Path:
    copy(source / "tokenizer.json", tmp_path)
    if config is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    if template is not None:
        (tmp_path / "chat_template.jinja").write_text(template)
    return tmp_path


def test_text_and_ids_and_digest(byte_tokenizer: Tokenizer, byte_tokenizer_dir: Path) -> None:
    ids = byte_tokenizer.encode("né<|im_end|>", add_special_tokens=True)
    assert len(ids) == 4
    assert byte_tokenizer.decode(ids) == "né"
    assert b"".join(map(byte_tokenizer.token_bytes, ids)) == "né<|im_end|>".encode()
    assert byte_tokenizer.digest == tokenizer_digest(byte_tokenizer_dir / "tokenizer.json")
    assert byte_tokenizer.vocab_size == 259


def test_every_byte_has_its_token(byte_tokenizer: Tokenizer) -> None:
    assert {byte_tokenizer.token_bytes(id_) for id_ in range(256)} == {bytes([b]) for b in range(256)}


def test_truncation_and_padding_of_the_file_are_off(byte_tokenizer_dir: Path, tmp_path: Path) -> None:
    folder = folder_with(tmp_path, byte_tokenizer_dir, template=None)
    content = json.loads((folder / "tokenizer.json").read_text())
    content["truncation"] = {
        "direction": "Right",
        "max_length": 2,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    content["padding"] = {
        "strategy": {"Fixed": 9},
        "direction": "Right",
        "pad_to_multiple_of": None,
        "pad_id": 0,
        "pad_type_id": 0,
        "pad_token": "!",
    }
    (folder / "tokenizer.json").write_text(json.dumps(content))
    assert len(Tokenizer.load(folder).encode("abcd", add_special_tokens=True)) == 4


def test_chat_is_rendered_up_to_the_assistant(byte_tokenizer: Tokenizer) -> None:
    assert byte_tokenizer.render_chat(HELLO) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\n<b>hé</b><|im_end|>\n"
        "<|im_start|>assistant\n"
    )
    assert byte_tokenizer.encode_chat(HELLO)[0] == 257


def test_what_templates_rely_on(byte_tokenizer_dir: Path, tmp_path: Path) -> None:
    template = """{{ bos_token }}{% for m in messages %}
    {% if loop.index > 2 %}
        {% break %}
    {% endif %}
    {% generation %}
{{ m | tojson }}{{ eos_token }}{% endgeneration %}
{% endfor %}
{{ strftime_now("%Y") | length }}{{ tools is none }}{{ add_generation_prompt }}"""
    config = {
        "bos_token": {"content": "<s>", "special": True},
        "eos_token": "</s>",
        "chat_template": "unused",
    }
    tokenizer = Tokenizer.load(folder_with(tmp_path, byte_tokenizer_dir, template=template, config=config))
    assert tokenizer.render_chat([*HELLO, *HELLO]) == (
        '<s>{"role": "system", "content": "Be brief."}</s>'
        '{"role": "user", "content": "<b>hé</b>"}</s>4TrueTrue'
    )


def test_the_default_one_of_several_templates(byte_tokenizer_dir: Path, tmp_path: Path) -> None:
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    folder = folder_with(tmp_path, byte_tokenizer_dir, template=None, config={"chat_template": templates})
    assert Tokenizer.load(folder).render_chat(HELLO) == "yes"


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0]['content'] + 1 }}", "refuses"),
        ("{{ messages.__class__.__mro__ }}", "unsafe"),
        (None, "no chat template"),
    ],
)
def test_a_template_that_refuses_is_the_clients_error(
    template: str | None, said: str, byte_tokenizer_dir: Path, tmp_path: Path
) -> None:
    tokenizer = Tokenizer.load(folder_with(tmp_path, byte_tokenizer_dir, template=template))
    with pytest.raises(InvalidRequest, match=said) as caught:
        tokenizer.render_chat(HELLO)
    assert caught.value.field == "messages"


def test_a_folder_that_cannot_be_used_is_refused_at_start(byte_tokenizer_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"no tokenizer\.json"):
        Tokenizer.load(tmp_path)
    folder = folder_with(tmp_path, byte_tokenizer_dir, template="{% if %}")
    with pytest.raises(SettingsError, match="chat template"):
        Tokenizer.load(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(SettingsError, match=r"tokenizer\.json"):
        Tokenizer.load(folder)


@pytest.mark.model
def test_the_default_model(smollm2_dir: Path) -> None:
    tokenizer = Tokenizer.load(smollm2_dir)
    assert tokenizer.vocab_size == 49152
    assert tokenizer.render_chat([ChatMessage("user", "hi")]).endswith(
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer.encode_chat([ChatMessage("user", "hi")])
    assert ids[0] == 1
    assert ids.count(2) == 2
    text = "Year 2024, naïve 你好 👩‍🚀\n"
    assert (
        b"".join(map(tokenizer.token_bytes, tokenizer.encode(text, add_special_tokens=False))).decode()
        == text
    )
