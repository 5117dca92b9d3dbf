"""Public fakes and the conformance suite of every seam."""
