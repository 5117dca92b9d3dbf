"""The trainer: algorithm-blind; see `base`."""
