"""The Jinja text of a chat template, compiled in a sandbox with the helpers that Hugging Face gives it.

Role: messages in, text out. Neighbours: `chat_template` calls it. Invariants: a template reads what it is
given and can change nothing (immutable sandbox); the date it sees is the one handed in, so that the same
conversation gives the same text all run long.

Helpers and settings are those of transformers' `apply_chat_template`: trimmed blocks, `{% break %}`,
`{% generation %}`, `tojson` without HTML escapes, `raise_exception`, `strftime_now`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from jinja2 import TemplateError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from rollwright.errors import ConfigError

Json = dict[str, Any]


class TemplateRefusal(ConfigError):
    """The template will not render this conversation."""


class Generation(Extension):
    """`{% generation %}…{% endgeneration %}` is what stands inside it: who said what is known already."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's own interface)

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        """The statements between the two tags."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class JinjaChat:
    """A compiled template.

    Args:
        source: the Jinja text.
        variables: what it may name beside the conversation (`bos_token`, `enable_thinking`).
        now: the date for `strftime_now`.

    Raises:
        ConfigError: the text is not Jinja.
    """

    def __init__(self, source: str, variables: Mapping[str, Any], now: datetime) -> None:
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
        )
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = now.strftime
        self._variables = dict(variables)
        try:
            self._template = environment.from_string(source)
        except TemplateError as error:
            raise ConfigError(f"the chat template is not Jinja that can be read: {error}") from error

    def render(self, messages: Sequence[Json], tools: Sequence[Json], *, prompt: bool) -> str:
        """The conversation as text; with `prompt` up to where the assistant speaks next.

        Raises:
            TemplateRefusal: the template raised an exception, its own or another.
        """
        given = {"messages": list(messages), "tools": list(tools) or None, "documents": None}
        try:
            return self._template.render(**given, add_generation_prompt=prompt, **self._variables)
        except Exception as error:  # boundary: a model's template is code that is not ours
            roles = ", ".join(str(message["role"]) for message in messages)
            raise TemplateRefusal(
                f"the chat template refuses a conversation of {roles}: {type(error).__name__}: {error}"
            ) from error


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise(text: str) -> str:
    raise TemplateError(text)
