"""Text of tasks, policies and tools as a terminal may be given it.

Role: one function that whoever prints to a terminal uses. Neighbours: `terminal`, `view.trace_text`, the
command line. Invariant: nothing that a terminal would obey or a reader could not see comes through.
"""

from __future__ import annotations


def clean(text: str) -> str:
    """`text` with everything but printable characters and line ends written out: `\\\\x1b`."""
    return "".join(c if c.isprintable() or c == "\n" else f"\\x{ord(c):02x}" for c in text)
