"""Tools and the one door to them; see `base` and `door`."""
