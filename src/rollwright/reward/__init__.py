"""Rewards in layers; see `base`."""
