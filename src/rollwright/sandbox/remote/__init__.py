"""Sandboxes on other people's machines, over their SDKs."""
