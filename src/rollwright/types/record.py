"""The two bases of every record, and the array types.

Role: frozen structs. Neighbours: the other files here. Invariant: immutable.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from msgspec import Struct

Json = Any  # a JSON value: None, bool, int, float, str, list or dict
Ints = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float32]
Marks = npt.NDArray[np.uint8]


class Record(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Base of records without arrays: compared by value."""


class ArrayRecord(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, eq=False):
    """Base of records that hold arrays: compared by identity."""
