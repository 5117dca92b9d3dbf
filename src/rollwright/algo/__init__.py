"""Algorithms: a group in, samples with per-token advantages and weights out; see `base`."""
