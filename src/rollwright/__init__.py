"""Rollwright: the infrastructure between a task and an updated policy.

Start with `rollwright.types` (everything that flows), then `docs/architecture.md`.
"""

__version__ = "0.1.0"
