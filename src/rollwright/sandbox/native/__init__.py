"""Sandboxes with namespaces, files, users and limits of their own."""
