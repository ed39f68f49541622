"""A model's chat template: a conversation to the text that the model was trained on. Knows no token ids."""

from __future__ import annotations

import datetime
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specsplit.core.errors import InvalidRequest, SettingsError
from specsplit.core.types import ChatMessage


class _GenerationBlock(Extension):
    """`{% generation %}` marks the assistant's text for training; here it is only its content."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """Renders with the names and filters that templates of Hugging Face models rely on."""

    def __init__(self, source: str, special_tokens: dict[str, str]) -> None:
        """Raises jinja2.TemplateSyntaxError."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols", _GenerationBlock]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        self._template = environment.from_string(source)
        self._special_tokens = special_tokens

    @classmethod
    def load(cls, folder: Path) -> ChatTemplate | None:
        """chat_template.jinja goes before a template in tokenizer_config.json; None when there is neither."""
        config_file, file = folder / "tokenizer_config.json", folder / "chat_template.jinja"
        try:
            config: dict[str, Any] = json.loads(config_file.read_text()) if config_file.is_file() else {}
        except ValueError as error:
            raise SettingsError(f"{config_file}: {error}", field="tokenizer") from error
        source = file.read_text() if file.is_file() else config.get("chat_template")
        if isinstance(source, list):  # several, by name
            source = {entry["name"]: entry["template"] for entry in source}.get("default")
        if source is None:
            return None
        try:
            return cls(source, _special_tokens(config))
        except jinja2.TemplateSyntaxError as error:
            raise SettingsError(f"the chat template in {folder}: {error}", field="tokenizer") from error

    def render(self, messages: Iterable[ChatMessage]) -> str:
        try:
            return self._template.render(
                messages=[{"role": message.role, "content": message.content} for message in messages],
                add_generation_prompt=True,
                tools=None,
                documents=None,
                **self._special_tokens,
            )
        except (jinja2.TemplateError, TypeError) as error:
            raise InvalidRequest(
                f"the model's chat template refuses the conversation: {error}", field="messages"
            ) from error


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and their like; each a text or an object that holds it as `content`."""
    found = {}
    for name, value in config.items():
        content = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(content, str):
            found[name] = content
    return found


def _to_json(value: Any, indent: int | None = None, **options: Any) -> str:
    """Unlike jinja's own, escapes neither HTML nor non-ASCII characters."""
    return json.dumps(value, ensure_ascii=False, indent=indent, **options)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
