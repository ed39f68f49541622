"""Text to token ids and back, as the model's own tokenizer does it. Knows no request and no stop condition.

Text that spells a special token, such as `<|im_end|>` inside a user's message, becomes that token: the
model's tokenizer decides, as in other servers. Callers that mind this pass token ids.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import tokenizers

from specsplit.core.digest import tokenizer_digest
from specsplit.core.errors import InvalidRequest, SettingsError
from specsplit.core.types import ChatMessage
from specsplit.gateway.text.chat_template import ChatTemplate


def _byte_of_char() -> dict[str, int]:
    """The character that stands for each byte in byte-level vocabularies (GPT-2's table), inverted.

    Printable bytes stand for themselves, the others for the characters from U+0100 on, in byte order.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    table = {chr(byte): byte for byte in printable}
    table.update({chr(0x100 + index): byte for index, byte in enumerate(others)})
    return table


_BYTE_OF_CHAR = _byte_of_char()


class Tokenizer:
    """Shared by all requests; safe to use from several threads."""

    def __init__(self, backend: tokenizers.Tokenizer, *, digest: str, template: ChatTemplate | None) -> None:
        backend.no_truncation()
        backend.no_padding()
        added = backend.get_added_tokens_decoder()
        self.digest = digest
        self.vocab_size = backend.get_vocab_size(with_added_tokens=True)
        self._backend = backend
        self._template = template
        self._special_ids = frozenset(id_ for id_, token in added.items() if token.special)
        self._added_ids = frozenset(added)
        self._is_byte_level = '"ByteLevel"' in json.dumps(json.loads(backend.to_str())["decoder"])

    @classmethod
    def load(cls, folder: Path) -> Tokenizer:
        """Reads tokenizer.json and, where present, tokenizer_config.json and chat_template.jinja.

        Raises SettingsError when they cannot be used.
        """
        file = folder / "tokenizer.json"
        if not file.is_file():
            raise SettingsError(f"no tokenizer.json in {folder}", field="tokenizer")
        try:
            backend = tokenizers.Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises nothing narrower
            raise SettingsError(f"{file}: {error}", field="tokenizer") from error
        return cls(backend, digest=tokenizer_digest(file), template=ChatTemplate.load(folder))

    def encode(self, text: str, *, add_special_tokens: bool) -> tuple[int, ...]:
        return tuple(self._backend.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Sequence[int]) -> str:
        """Special tokens and ids unknown to the tokenizer are left out; invalid bytes become U+FFFD."""
        return self._backend.decode(ids, skip_special_tokens=True)

    def encode_chat(self, messages: Iterable[ChatMessage]) -> tuple[int, ...]:
        """The template spells out all special tokens, so none are added."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Iterable[ChatMessage]) -> str:
        """The conversation in the model's format, up to where the assistant speaks next."""
        if self._template is None:
            raise InvalidRequest("the model has no chat template; use a plain prompt", field="messages")
        return self._template.render(messages)

    def is_text(self, id_: int) -> bool:
        """Whether the token can show in decoded text."""
        return id_ not in self._special_ids and self._backend.id_to_token(id_) is not None

    def token_bytes(self, id_: int) -> bytes:
        """What a single token stands for, special tokens by their names; empty for an id without a token."""
        token: Any = self._backend.id_to_token(id_)
        if token is None:
            return b""
        if id_ in self._added_ids:
            return str(token).encode()
        if self._is_byte_level and all(char in _BYTE_OF_CHAR for char in token):
            return bytes(_BYTE_OF_CHAR[char] for char in token)
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            return bytes.fromhex(token[3:5])
        return str(token).replace("\u2581", " ").encode()
