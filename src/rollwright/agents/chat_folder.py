"""The chat template that lies in a checkpoint's folder.

Role: reads what Hugging Face models bring along. Neighbours: `chat_template` is made of it; the caller brings
the tokenizer of the same folder. Invariant: nothing of the folder is executed but the template, in its
sandbox.

Read are `chat_template.jinja` (before a template in `tokenizer_config.json`), the names of the special tokens
in `tokenizer_config.json`, and the ids that end generation in `generation_config.json`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from rollwright.agents.chat_template import HERMES, ChatCodec, ChatTemplate
from rollwright.errors import ConfigError


def template_of(
    folder: Path,
    codec: ChatCodec,
    now: datetime,
    *,
    name: str = "",
    variables: Mapping[str, Any] | None = None,
    marks: tuple[str, str] = HERMES,
) -> ChatTemplate:
    """The folder's chat template over its tokenizer.

    Args:
        name: which, where the folder has several; "" is the one for tools where there is one, else the
            default.
        variables: what the template may name beside the special tokens (`enable_thinking`).

    Raises:
        ConfigError: there is no chat template, or none of that name, or one that cannot serve.
    """
    told = _json(folder / "tokenizer_config.json")
    source = _source(folder, told, name)
    tokens = {key: _name(value) for key, value in told.items() if key.endswith("_token") and _name(value)}
    return ChatTemplate(
        codec,
        source,
        now,
        variables={**tokens, **(variables or {})},
        stop=_stops(folder, codec, tokens.get("eos_token", "")),
        marks=marks,
    )


def _source(folder: Path, told: Mapping[str, Any], name: str) -> str:
    found: dict[str, str] = {}
    match told.get("chat_template"):
        case str(text):
            found["default"] = text
        case list(several):
            found |= {str(each["name"]): str(each["template"]) for each in several}
    alone = folder / "chat_template.jinja"
    if alone.is_file():
        found["default"] = alone.read_text(encoding="utf-8")
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        found[path.stem] = path.read_text(encoding="utf-8")
    if not found:
        raise ConfigError(
            f"{folder} has no chat template (chat_template.jinja, or in tokenizer_config.json): take an "
            "instruction-tuned model, or put a template there"
        )
    wanted: Sequence[str] = (name,) if name else ("tool_use", "default", next(iter(found)))
    chosen = next((found[each] for each in wanted if each in found), None)
    if chosen is None:
        raise ConfigError(f"{folder} has no chat template {name!r}; known: {', '.join(sorted(found))}")
    return chosen


def _stops(folder: Path, codec: ChatCodec, eos: str) -> list[str]:
    """Names of the control tokens that end generation."""
    ended = _json(folder / "generation_config.json").get("eos_token_id", [])
    ids = set(ended if isinstance(ended, list) else [ended])
    return [name for name, id in codec.controls.items() if id in ids or name == eos]


def _name(token: Any) -> str:
    """A special token is written as its text, or as an object with it."""
    content = token.get("content") if isinstance(token, dict) else token
    return content if isinstance(content, str) else ""


def _json(path: Path) -> dict[str, Any]:
    """A JSON object; an empty one where there is no such file."""
    if not path.is_file():
        return {}
    try:
        told = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ConfigError(f"{path} is not JSON: {error}") from error
    if not isinstance(told, dict):
        raise ConfigError(f"{path} holds a JSON {type(told).__name__}, expected an object")
    return told
