"""Text ↔ token ids with the tokenizer of a Hugging Face model (`tokenizer.json`).

Role: the `Codec` of policies that come from a checkpoint; no torch, no transformers. Neighbours:
`agents.chat_template` gives it template text, agents give it content; grammars read its `vocabulary`.
Invariants: `encode` never gives a control id, whatever the text spells; `encode_marked` gives one exactly
where a control name stands in the text unbroken; decoding works on bytes, so pieces of a character that
lie in two tokens come together again.

Control tokens are the added tokens that are special or look like markup (`<…>`, `[…]`). Other added tokens
(runs of spaces, words of a domain) are ordinary text.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rollwright.errors import ConfigError, MissingExtra, SchemaError
from rollwright.model.base import Vocabulary

if TYPE_CHECKING:
    from tokenizers import Tokenizer

UNKNOWN = "\N{REPLACEMENT CHARACTER}".encode()
"""Bytes of an id that has no piece: models pad their vocabulary, and a policy may sample the padding."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>\Z")
_MARKUP = {"<": ">", "[": "]"}


class HfTokenizer:
    """The tokenizer that `text`, the content of a `tokenizer.json`, describes.

    Byte-level tables (GPT-2, Llama 3, Qwen) and sentencepiece-like ones (Llama 2, Mistral, Gemma) are read.

    Raises:
        MissingExtra: the package `tokenizers` is not installed.
        SchemaError: not a tokenizer's JSON.
        ConfigError: a tokenizer of another kind (WordPiece), whose tokens do not spell bytes.
    """

    def __init__(self, text: str) -> None:
        try:
            table = json.loads(text)
            added, vocab = table["added_tokens"], _vocabulary(table)
        except (ValueError, KeyError, TypeError) as error:
            raise SchemaError(f"not a tokenizer.json: {type(error).__name__}: {error}") from error
        self._text = text
        self._control: dict[str, int] = {each["content"]: each["id"] for each in added if is_control(each)}
        self._strips = {e["content"]: (bool(e.get("lstrip")), bool(e.get("rstrip"))) for e in added}
        self._marks = _any_of(self._control)
        self._pieces = _pieces(table, vocab, added)
        bare = {
            **table,
            "added_tokens": [each for each in added if not is_control(each)],
            "post_processor": None,
            "truncation": None,
            "padding": None,
        }
        self._first, self._rest = _made(bare), _made(_without_prefix(bare))
        unknown = table["model"].get("unk_token") or ""
        self._forbidden = set(self._control.values()) - {vocab.get(unknown, -1)}
        kept = {name: table.get(name) for name in ("model", "added_tokens", "normalizer", "pre_tokenizer")}
        self._fingerprint = hashlib.sha256(json.dumps(kept, sort_keys=True).encode()).hexdigest()

    @classmethod
    def from_folder(cls, folder: Path) -> HfTokenizer:
        """The tokenizer of a checkpoint's folder.

        Raises:
            ConfigError: there is no `tokenizer.json` in it.
        """
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ConfigError(
                f"{folder} has no tokenizer.json: save the model's fast tokenizer there "
                "(`AutoTokenizer.from_pretrained(…).save_pretrained(folder)`)"
            )
        return cls(path.read_text(encoding="utf-8"))

    @property
    def size(self) -> int:
        """Number of ids; a model may have more."""
        return len(self._pieces)

    @property
    def controls(self) -> Mapping[str, int]:
        """Control tokens by name."""
        return self._control

    def control(self, name: str) -> int:
        """Id of a control token.

        Raises:
            ConfigError: there is none of that name; the text lists those there are.
        """
        if name not in self._control:
            raise ConfigError(f"no control token {name!r}; known: {', '.join(sorted(self._control))}")
        return self._control[name]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; control names in it stay literal text. A lone surrogate, which UTF-8 cannot hold,
        becomes "?"."""
        return self._literal(_sound(text), self._rest)

    def encode_marked(self, text: str, *, barrier: str = "", begins: bool = False) -> list[int]:
        """Ids of template text: a control name in it is that control token, all else is encoded as `encode`
        does.

        Args:
            text: what a template gave.
            barrier: a character that is left out of the text; a name that it breaks is literal text.
            begins: the text stands at the beginning of a row (sentencepiece adds a space there).
        """
        ids: list[int] = []
        literal, at = "", 0
        for mark in self._marks.finditer(text):
            left, right = self._strips[mark.group()]
            literal += text[at : mark.start()]
            ids += self._between(literal.rstrip() if left else literal, barrier, begins and not ids)
            ids.append(self._control[mark.group()])
            literal, at = "", mark.end()
            while right and at < len(text) and text[at].isspace():
                at += 1
        return ids + self._between(text[at:], barrier, begins and not ids)

    def _between(self, text: str, barrier: str, begins: bool) -> list[int]:
        literal = text.replace(barrier, "") if barrier else text
        return self._literal(_sound(literal), self._first if begins else self._rest) if literal else []

    def _literal(self, text: str, tokenizer: Tokenizer) -> list[int]:
        """Ids of `text`, none of them a control id: where the table itself spells one, it is cut in two."""
        found = tokenizer.encode(text, add_special_tokens=False)
        ids: list[int] = found.ids
        if self._forbidden.isdisjoint(ids):
            return ids
        start = next(at[0] for id, at in zip(ids, found.offsets, strict=True) if id in self._forbidden)
        cut = min(start + 1, len(text) - 1)
        if cut < 1:
            raise ConfigError(f"this tokenizer has no way to write {text!r} but a control token")
        return self._literal(text[:cut], tokenizer) + self._literal(text[cut:], self._rest)

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control ids decode to their names; bytes that are not UTF-8, and ids that the
        tokenizer does not have, become U+FFFD.

        Raises:
            ValueError: a negative id.
        """
        table = self._pieces
        if len(ids) and min(ids) < 0:
            raise ValueError(f"token ids are not negative, got {min(ids)}")
        return b"".join([table[i] if i < len(table) else UNKNOWN for i in ids]).decode("utf-8", "replace")

    def vocabulary(self) -> Vocabulary:
        """What each id spells; an id without a token spells nothing."""
        return Vocabulary(pieces=self._pieces, control=dict(self._control))

    def fingerprint(self) -> str:
        """SHA-256 of what decides which text gives which ids: equal exactly where every id means the
        same."""
        return self._fingerprint

    def to_json(self) -> str:
        """The `tokenizer.json` it was made of."""
        return self._text

    @classmethod
    def from_json(cls, text: str) -> HfTokenizer:
        """The tokenizer that `to_json` wrote."""
        return cls(text)


def is_control(added: Mapping[str, Any]) -> bool:
    """Whether an added token is one that no text may become: special, or written like markup."""
    name = added["content"]
    return len(name) > 1 and (bool(added.get("special")) or _MARKUP.get(name[0]) == name[-1])


def _sound(text: str) -> str:
    return text.encode("utf-8", "replace").decode()


def _any_of(names: Mapping[str, int]) -> re.Pattern[str]:
    """Finds the longest name at the leftmost place; nothing where there are none."""
    ordered = sorted(names, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, ordered)) or r"(?!)")


def _vocabulary(table: Mapping[str, Any]) -> dict[str, int]:
    """Token → id of the model's own table; Unigram keeps a list of (token, score)."""
    vocab = table["model"]["vocab"]
    return {token: id for id, (token, _) in enumerate(vocab)} if isinstance(vocab, list) else vocab


def _made(table: Mapping[str, Any]) -> Tokenizer:
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtra("the tokenizer of a Hugging Face model", "hf") from error
    try:
        return Tokenizer.from_str(json.dumps(table))
    except Exception as error:  # boundary: the package raises bare Exception for what it cannot read
        raise SchemaError(f"not a tokenizer.json: {error}") from error


def _without_prefix(node: Any) -> Any:
    """The table of a text that does not begin a row: sentencepiece's space at the beginning is left out."""
    if isinstance(node, dict):
        if node.get("type") == "Metaspace" and node.get("prepend_scheme") == "first":
            return {**node, "prepend_scheme": "never"}
        return {k: v if k in ("vocab", "merges") else _without_prefix(v) for k, v in node.items()}
    return [_without_prefix(each) for each in node] if isinstance(node, list) else node


def _pieces(
    table: Mapping[str, Any], vocab: Mapping[str, int], added: Sequence[Mapping[str, Any]]
) -> tuple[bytes, ...]:
    """Bytes of each id, in order."""
    kinds, space = _decoders(table.get("decoder"))
    if "ByteLevel" in kinds:
        spelled = {token: _byte_level(token) for token in vocab}
    elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
        spelled = {token: _sentencepiece(token, space) for token in vocab}
    else:
        raise ConfigError(
            f"a tokenizer whose decoder is {', '.join(sorted(kinds)) or 'missing'} is not supported; "
            "expected byte-level or sentencepiece-like"
        )
    found = {id: spelled[token] for token, id in vocab.items()}
    found |= {each["id"]: each["content"].encode() for each in added}
    return tuple(found.get(id, b"") for id in range(max(found, default=-1) + 1))


def _decoders(decoder: Any) -> tuple[set[str], str]:
    """Types of the decoders, and the character that stands for a space."""
    if not isinstance(decoder, dict):
        return set(), "▁"
    if decoder.get("type") != "Sequence":
        return {str(decoder.get("type"))}, str(decoder.get("replacement", "▁"))
    parts = [_decoders(each) for each in decoder["decoders"]]
    return {kind for kinds, _ in parts for kind in kinds}, next((s for _, s in parts if s != "▁"), "▁")


def _sentencepiece(token: str, space: str) -> bytes:
    byte = _BYTE.match(token)
    return bytes([int(byte.group(1), 16)]) if byte else token.replace(space, " ").encode()


def _byte_level(token: str) -> bytes:
    if all(letter in _LETTERS for letter in token):
        return bytes(_LETTERS[letter] for letter in token)
    return token.encode()


def _letters() -> dict[str, int]:
    """The letter that GPT-2's tokenizer writes for each byte: itself where it prints, else one from
    U+0100 on (source: openai/gpt-2, encoder.py)."""
    shown = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    hidden = [byte for byte in range(256) if byte not in shown]
    return {chr(b): b for b in shown} | {chr(256 + i): byte for i, byte in enumerate(hidden)}


_LETTERS = _letters()
