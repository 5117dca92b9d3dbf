"""Inference engines behind one seam; see `base`."""
