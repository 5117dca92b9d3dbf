"""Text ↔ token ids: bytes, known text pieces, and control pieces that no text can produce.

Role: the `Codec` of agents and templates; no torch. Neighbours: agents encode observations, the conductor
builds it from the task set's pieces and stores it with the model. Invariants: `decode(encode(text)) ==
text`; `encode` never gives a control id, so content that spells one stays content; the same table has the
same fingerprint.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

import msgspec

from rollwright.errors import ConfigError, SchemaError
from rollwright.model.base import Vocabulary
from rollwright.types import Record
from rollwright.wire import SCHEMA

BYTES = 256


class _Table(Record, frozen=True, kw_only=True):
    """The stored form."""

    schema: int
    pieces: tuple[str, ...]
    control: tuple[str, ...]


class _Node:
    """One byte deeper in the trie: the id of the piece that ends here (-1: none) and where to go on."""

    __slots__ = ("id", "next")

    def __init__(self) -> None:
        self.id = -1
        self.next: dict[int, _Node] = {}


class PieceTokenizer:
    """256 byte tokens, then `pieces`, then `control`, in this order.

    Text is encoded by greedy longest match over its UTF-8 bytes. Repeated pieces and pieces of one byte
    (which has its id already) get no id of their own. A lone surrogate, which UTF-8 cannot hold, becomes
    "?".

    Raises:
        ConfigError: an empty piece, or a control piece named twice or empty.
    """

    def __init__(self, pieces: Sequence[str], control: Sequence[str]) -> None:
        if "" in pieces or "" in control or len(set(control)) != len(control):
            raise ConfigError("a tokenizer needs pieces that are not empty and control pieces that differ")
        self.pieces = tuple(piece for piece in dict.fromkeys(pieces) if len(piece.encode()) > 1)
        self.control_pieces = tuple(control)
        self._bytes = [bytes([i]) for i in range(BYTES)]
        self._bytes += [piece.encode() for piece in (*self.pieces, *self.control_pieces)]
        self._first_control = BYTES + len(self.pieces)
        self._control = {name: self._first_control + i for i, name in enumerate(self.control_pieces)}
        self._root = _Node()
        for id, piece in enumerate(self._bytes[: self._first_control]):
            node = self._root
            for byte in piece:
                node = node.next.setdefault(byte, _Node())
            node.id = id

    @property
    def size(self) -> int:
        """Number of ids."""
        return len(self._bytes)

    def control(self, name: str) -> int:
        """Id of a control piece.

        Raises:
            ConfigError: there is none of that name; the text lists those there are.
        """
        if name not in self._control:
            raise ConfigError(f"no control piece {name!r}; known: {', '.join(self.control_pieces)}")
        return self._control[name]

    def encode(self, text: str) -> list[int]:
        """Ids of `text`; control pieces in it stay literal text."""
        return list(self._matches(text.encode("utf-8", "replace")))

    def _matches(self, data: bytes) -> Iterator[int]:
        root, at, size = self._root, 0, len(data)
        while at < size:
            node, best, end = root, -1, at
            for i in range(at, size):
                deeper = node.next.get(data[i])
                if deeper is None:
                    break
                node = deeper
                if node.id >= 0:
                    best, end = node.id, i + 1
            yield best
            at = end

    def decode(self, ids: Sequence[int]) -> str:
        """Text of `ids`; control ids decode to their names; bytes that are not UTF-8 become U+FFFD.

        Raises:
            ValueError: an id outside 0 … size-1.
        """
        table = self._bytes
        if len(ids) and not 0 <= min(ids) <= max(ids) < len(table):
            raise ValueError(f"token ids are 0 … {len(table) - 1}, got {min(ids)} … {max(ids)}")
        return b"".join([table[id] for id in ids]).decode("utf-8", "replace")

    def vocabulary(self) -> Vocabulary:
        """What each id spells."""
        return Vocabulary(pieces=tuple(self._bytes), control=dict(self._control))

    def fingerprint(self) -> str:
        """SHA-256 of the table: equal exactly where every id means the same."""
        table = msgspec.json.encode((self.pieces, self.control_pieces))
        return hashlib.sha256(table).hexdigest()

    def to_json(self) -> str:
        """The table as JSON text, with its schema version."""
        table = _Table(schema=SCHEMA, pieces=self.pieces, control=self.control_pieces)
        return msgspec.json.encode(table).decode()

    @classmethod
    def from_json(cls, text: str) -> PieceTokenizer:
        """The tokenizer that `to_json` wrote.

        Raises:
            SchemaError: not such a table, or of another schema version.
        """
        try:
            table = msgspec.json.decode(text, type=_Table)
        except msgspec.DecodeError as error:
            raise SchemaError(f"not a tokenizer table: {error}") from error
        if table.schema != SCHEMA:
            raise SchemaError(f"tokenizer table of schema {table.schema}, expected {SCHEMA}")
        return cls(table.pieces, table.control)
