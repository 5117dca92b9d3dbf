"""Content-addressed payloads; see `base`."""
