"""A checkpoint's folder gives the template that lies in it."""

from __future__ import annotations

import json
from pathlib import Path

import chat_styles as styles
import pytest
from chat_styles import NOW, byte_level
from needs import needed

from rollwright.agents.chat_folder import template_of
from rollwright.errors import ConfigError
from rollwright.types import Message

needed("tokenizers", module=True)

CODEC = byte_level()
ASK = [Message(role="user", content="Hi")]


def folder(path: Path, config: object, **files: str) -> Path:
    (path / "tokenizer_config.json").write_text(json.dumps(config))
    for name, text in files.items():
        file = path / name.replace("__", "/").replace("_jinja", ".jinja").replace("_json", ".json")
        file.parent.mkdir(exist_ok=True)
        file.write_text(text)
    return path


def test_special_tokens_and_stops_come_from_the_folder(tmp_path: Path) -> None:
    config = {
        "chat_template": styles.LLAMA,
        "bos_token": {"content": "<|begin_of_text|>", "lstrip": False},
        "eos_token": "<|eot_id|>",
        "add_bos_token": True,
    }
    ends = [CODEC.controls["<|eom_id|>"], 99_999]
    path = folder(tmp_path, config, generation_config_json=json.dumps({"eos_token_id": ends}))
    template = template_of(path, CODEC, NOW)
    assert template.stop == (CODEC.controls["<|eot_id|>"], CODEC.controls["<|eom_id|>"])
    assert template.start(ASK, ())[0] == CODEC.controls["<|begin_of_text|>"]


def test_the_file_comes_before_the_configuration_and_tools_before_the_default(tmp_path: Path) -> None:
    named = [{"name": "default", "template": styles.CHATML}, {"name": "rag", "template": styles.LLAMA}]
    path = folder(tmp_path, {"chat_template": named})
    assert template_of(path, CODEC, NOW).end == "<|im_end|>"
    assert template_of(path, CODEC, NOW, name="rag").end == "<|eot_id|>"
    with pytest.raises(ConfigError, match="no chat template 'x'; known: default, rag"):
        template_of(path, CODEC, NOW, name="x")
    (path / "chat_template.jinja").write_text(styles.STRICT)
    assert template_of(path, CODEC, NOW).end == "</s>"
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "tool_use.jinja").write_text(styles.LLAMA)
    assert template_of(path, CODEC, NOW).end == "<|eot_id|>"


def test_what_is_missing_is_said(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no chat template"):
        template_of(tmp_path, CODEC, NOW)
    (tmp_path / "tokenizer_config.json").write_text("{")
    with pytest.raises(ConfigError, match="is not JSON"):
        template_of(tmp_path, CODEC, NOW)
    (tmp_path / "tokenizer_config.json").write_text("[]")
    with pytest.raises(ConfigError, match="expected an object"):
        template_of(tmp_path, CODEC, NOW)


def test_variables_reach_the_template(tmp_path: Path) -> None:
    source = (
        styles.CHATML
        + "{% if enable_thinking is defined and not enable_thinking %}<think></think>{% endif %}"
    )
    path = folder(tmp_path, {}, chat_template_jinja=source)
    plain = template_of(path, CODEC, NOW).start(ASK, ()).tolist()
    quiet = template_of(path, CODEC, NOW, variables={"enable_thinking": False}).start(ASK, ()).tolist()
    assert CODEC.decode(quiet) == CODEC.decode(plain) + "<think></think>"
