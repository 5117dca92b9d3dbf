"""What a view reads of a run's folder: what each token stands for."""

from __future__ import annotations

from pathlib import Path

import pytest

from rollwright.agents.template import CONTROL
from rollwright.config import load
from rollwright.model.tokenizer import PieceTokenizer
from rollwright.run.folder import RunFolder, create
from rollwright.view.folder import viewed


def made(folder: Path, table: str) -> RunFolder:
    run = create(load([], [f"folder={folder}"]))
    run.tokenizer.write_text(table, encoding="utf-8")
    return run


def test_tokens_of_our_own_table(tmp_path: Path) -> None:
    codec = PieceTokenizer(["héllo", "SELECT "], CONTROL)
    with viewed(made(tmp_path, codec.to_json())) as view:
        assert b"".join(view.tokens[id] for id in codec.encode("SELECT héllo!")) == "SELECT héllo!".encode()
        assert view.tokens[codec.control("<|end|>")] == b"<|end|>" and len(view.tokens) == codec.size


@pytest.mark.needs("tokenizers")
def test_tokens_of_a_hugging_face_table(tmp_path: Path) -> None:
    from chat_styles import byte_level

    codec = byte_level()
    with viewed(made(tmp_path, codec.to_json())) as view:
        assert (
            b"".join(view.tokens[id] for id in codec.encode("where is it, é?")) == "where is it, é?".encode()
        )
        assert len(view.tokens) == codec.size


@pytest.mark.parametrize("table", ["", "{}", "[1", '{"model": 3}', "\ud800"])
def test_what_is_no_table_shows_no_tokens(table: str, tmp_path: Path) -> None:
    run = made(tmp_path, "")
    run.tokenizer.write_bytes(table.encode("utf-8", "surrogatepass"))
    with viewed(run) as view:
        assert view.tokens == []
