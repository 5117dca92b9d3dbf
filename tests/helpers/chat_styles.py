"""Chat templates in the styles that models have, and small tokenizers trained on the spot.

None is a model's own file; each does to history what its style is known for.
"""

from __future__ import annotations

import functools
import json
from datetime import UTC, datetime
from typing import Any

from rollwright.agents.chat_template import ChatTemplate
from rollwright.model.hf_tokenizer import HfTokenizer

NOW = datetime(2026, 3, 5, tzinfo=UTC)

CHATML_NAMES = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>")
LLAMA_NAMES = (
    *("<|begin_of_text|>", "<|end_of_text|>", "<|start_header_id|>", "<|end_header_id|>"),
    *("<|eot_id|>", "<|eom_id|>"),
)
MISTRAL_NAMES = (
    *("<s>", "</s>", "[INST]", "[/INST]", "[TOOL_CALLS]", "[AVAILABLE_TOOLS]", "[/AVAILABLE_TOOLS]"),
    *("[TOOL_RESULTS]", "[/TOOL_RESULTS]"),
)
EVERY_NAME = (*CHATML_NAMES, *TAGS, *LLAMA_NAMES, *MISTRAL_NAMES)

CHATML = """
{%- if messages[0].role != 'system' %}{{ '<|im_start|>system\\nBe brief.<|im_end|>\\n' }}{% endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

HERMES = """
{%- if tools %}
{{- '<|im_start|>system\\n' }}
{%- if messages[0]['role'] == 'system' %}{{ messages[0]['content'] + '\\n\\n' }}{% endif %}
{{- 'Tools:\\n<tools>' }}
{%- for tool in tools %}{{ '\\n' ~ (tool | tojson) }}{% endfor %}
{{- '\\n</tools><|im_end|>\\n' }}
{%- elif messages[0]['role'] == 'system' %}
{{- '<|im_start|>system\\n' + messages[0]['content'] + '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' or message.role == 'assistant' %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{%- if loop.previtem.role != 'tool' %}{{ '<|im_start|>user' }}{% endif %}
{{- '\\n<tool_response>\\n' + message.content + '\\n</tool_response>' }}
{%- if loop.last or loop.nextitem.role != 'tool' %}{{ '<|im_end|>\\n' }}{% endif %}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

_THINKING = """
{%- set ns = namespace(last=-1) %}
{%- for message in messages %}
{%- if message.role == 'QUERY' %}{% set ns.last = loop.index0 %}{% endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'assistant' %}
{%- set content = message.content %}
{%- if '</think>' in content and loop.index0 < ns.last %}
{%- set content = content.split('</think>')[-1].lstrip('\\n') %}
{%- endif %}
{{- '<|im_start|>assistant\\n' + content + '<|im_end|>\\n' }}
{%- elif message.role == 'tool' %}
{{- '<|im_start|>user\\n<tool_response>\\n' + message.content + '\\n</tool_response><|im_end|>\\n' }}
{%- else %}
{{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"""

THINKING = _THINKING.replace("'QUERY'", "'user'")
"""Drops the thinking of turns before the last question: it stays while tools are used."""
FORGETFUL = _THINKING.replace("'QUERY'", "'tool'")
"""Drops the thinking of every turn that a tool has answered."""

EMPTY_THOUGHT = CHATML.replace(
    "assistant\\n' }}{% endif", "assistant\\n<think>\\n\\n</think>\\n\\n' }}{% endif"
)
"""Writes an empty thought where the assistant speaks, and none in history."""

LLAMA = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
{%- set system = messages[0]['content'] | trim %}{% set messages = messages[1:] %}
{%- else %}{% set system = '' %}{% endif %}
{{- '<|start_header_id|>system<|end_header_id|>\\n\\nToday: ' + strftime_now('%d %b %Y') + '\\n' + system }}
{{- '<|eot_id|>' }}
{%- for message in messages %}
{%- set role = 'ipython' if message.role == 'tool' else message.role %}
{{- '<|start_header_id|>' + role + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}"""

MISTRAL = """{{- bos_token }}
{%- set ns = namespace(index=0, last=0) %}
{%- if messages[0].role == 'system' %}
{%- set system = messages[0].content %}{% set messages = messages[1:] %}
{%- endif %}
{%- for message in messages %}
{%- if message.role == 'user' %}{% set ns.last = loop.index0 %}{% endif %}
{%- if message.role == 'user' or (message.role == 'assistant' and message.tool_calls is not defined
    and not loop.first and loop.previtem.role != 'tool') %}
{%- if (message.role == 'user') != (ns.index % 2 == 0) %}
{{- raise_exception('Roles must alternate') }}
{%- endif %}
{%- set ns.index = ns.index + 1 %}
{%- endif %}
{%- endfor %}
{%- for message in messages %}
{%- if message.role == 'user' %}
{%- if loop.index0 == ns.last and tools is not none %}
{{- '[AVAILABLE_TOOLS]' + (tools | tojson) + '[/AVAILABLE_TOOLS]' }}
{%- endif %}
{{- '[INST]' }}
{%- if loop.index0 == ns.last and system is defined %}{{ system + '\\n\\n' }}{% endif %}
{{- message.content + '[/INST]' }}
{%- elif message.role == 'tool' %}
{%- if message.tool_call_id is undefined or message.tool_call_id | length != 9 %}
{{- raise_exception('Tool call ids have nine letters') }}
{%- endif %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- else %}
{{- message.content + eos_token }}
{%- endif %}
{%- endfor %}"""
"""Puts tools and system message before the last question, wherever it stands."""

STRICT = """
{%- for message in messages %}
{%- if message.role == 'tool' %}
{%- if loop.previtem.role == 'assistant' and not loop.previtem.tool_calls %}
{{- raise_exception('A tool answers a call') }}
{%- endif %}
{{- '[TOOL_RESULTS]' + message.content + '[/TOOL_RESULTS]' }}
{%- elif message.tool_calls %}
{{- '[TOOL_CALLS][' }}
{%- for call in message.tool_calls %}{{ call.function | tojson }}{{ '' if loop.last else ', ' }}{% endfor %}
{{- ']</s>' }}
{%- elif message.role == 'assistant' %}{{ message.content + '</s>' }}
{%- else %}{{ '[INST]' + message.content + '[/INST]' }}{% endif %}
{%- endfor %}"""
"""Takes a tool's message only behind calls given as structure, and writes those in place of the text."""

SQUEEZED = HERMES.replace("message.content + '<|im_end|>", "message.content | trim + '<|im_end|>")
"""Trims what an assistant said."""

VARIABLES = {"bos_token": "<|begin_of_text|>", "eos_token": "<|im_end|>"}

_TEXT = (
    "the quick brown fox jumps over the lazy dog; where is it? let me look it up again: "
    "assistant user system tool SELECT name FROM rooms WHERE id = 12\n\nNothing. Here.\n"
)


@functools.cache
def byte_level(names: tuple[str, ...] = EVERY_NAME, size: int = 420) -> HfTokenizer:
    """A byte-level BPE as GPT-2, Llama 3 and Qwen have it; tags are added tokens that are not special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    letters = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, initial_alphabet=letters, show_progress=False)
    made.train_from_iterator([_TEXT] * 4, trainer)
    made.add_tokens([AddedToken(n, special=n not in TAGS, normalized=False) for n in names])
    return HfTokenizer(made.to_str())


@functools.cache
def sentencepiece(names: tuple[str, ...] = EVERY_NAME, scheme: str = "first") -> HfTokenizer:
    """A BPE with byte fallback and spaces as ▁, as Llama 2 and Mistral have it; `<s>` lies in the table."""
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    made = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(
        vocab_size=460, special_tokens=["<unk>", "<s>", *bytes_], show_progress=False
    )
    made.train_from_iterator([_TEXT] * 4, trainer)
    table: dict[str, Any] = json.loads(made.to_str())
    table["added_tokens"] = [each for each in table["added_tokens"] if each["content"] in ("<unk>", "<s>")]
    table["decoder"] = json.loads(
        '{"type":"Sequence","decoders":[{"type":"Replace","pattern":{"String":"▁"},"content":" "},'
        '{"type":"ByteFallback"},{"type":"Fuse"}]}'
    )
    again = Tokenizer.from_str(json.dumps(table))
    again.add_tokens([AddedToken(n, special=n not in TAGS, normalized=False) for n in names if n != "<s>"])
    return HfTokenizer(again.to_str())


def chat(source: str, codec: HfTokenizer | None = None, **options: Any) -> ChatTemplate:
    """`source` over a byte-level tokenizer."""
    variables = {**VARIABLES, **options.pop("variables", {})}
    return ChatTemplate(codec or byte_level(), source, NOW, variables=variables, **options)
