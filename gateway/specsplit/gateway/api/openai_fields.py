"""Fields of OpenAI's bodies that have no choice here: which values change nothing; the rest is refused.

Knows no models and no HTTP. What comes with a later version leaves this file.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

from specsplit.core.errors import UnsupportedParameter

Json: TypeAlias = dict[str, Any]
Only: TypeAlias = Mapping[str, tuple[object, ...]]

_COMMON_ONLY: Only = {
    "n": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None, {}),
    "prediction": (None,),
    "response_format": (None, {"type": "text"}),
    "service_tier": (None, "auto", "default"),
}
COMPLETION_ONLY: Only = {
    **_COMMON_ONLY,
    "best_of": (None, 1),
    "echo": (None, False),
    "suffix": (None,),
}
CHAT_ONLY: Only = {
    **_COMMON_ONLY,
    "tools": (None, []),
    "tool_choice": (None, "none", "auto"),
    "functions": (None, []),
    "function_call": (None, "none", "auto"),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "moderation": (None,),
    "reasoning_effort": (None,),
    "verbosity": (None,),
    "web_search_options": (None,),
}
_MESSAGE_ONLY: Only = {
    "name": (None,),
    "tool_calls": (None, []),
    "tool_call_id": (None,),
    "function_call": (None,),
    "refusal": (None,),
    "audio": (None,),
    "annotations": (None, []),
}


def without_no_ops(body: Json, only: Only, prefix: str = "") -> Json:
    """The body without the fields of the table; raises UnsupportedParameter for a value not listed there."""
    rest = {}
    for name, value in body.items():
        if name not in only:
            rest[name] = value
        elif not any(_is_same(value, listed) for listed in only[name]):
            raise UnsupportedParameter(
                f"{prefix}{name}: this value is not supported (yet); leave it out", field=f"{prefix}{name}"
            )
    return rest


def without_no_ops_in_messages(body: Json) -> Json:
    messages = body.get("messages")
    if not isinstance(messages, list):
        return body
    return body | {
        "messages": [
            without_no_ops(message, _MESSAGE_ONLY, f"messages.{index}.")
            if isinstance(message, dict)
            else message
            for index, message in enumerate(messages)
        ]
    }


def _is_same(value: object, listed: object) -> bool:
    """Equal as JSON: true is not 1."""
    return value == listed and (type(value) is bool) == (type(listed) is bool)
