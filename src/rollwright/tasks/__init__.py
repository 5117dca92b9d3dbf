"""Task sets; see `base`."""
