"""Isolated environments for actions; see `base`."""
