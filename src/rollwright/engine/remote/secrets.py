"""Tokens from the environment, the one place of this package that reads it.

Role: secrets that stand in no file. Neighbours: `RemoteConfig` and the command line ask. Invariant: an empty
variable is none.
"""

from __future__ import annotations

import os

PUBLIC, CONTROL = "ROLLWRIGHT_TOKEN", "ROLLWRIGHT_CONTROL_TOKEN"


def token() -> str:
    """Of the public port; empty where there is none."""
    return os.environ.get(PUBLIC, "")


def control_token() -> str:
    """Of the control port; empty where there is none."""
    return os.environ.get(CONTROL, "")
