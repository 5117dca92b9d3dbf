"""Evaluation: statistics and reports; see `statistics`."""
