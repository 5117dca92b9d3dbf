"""Attempts of agent code to get out of its sandbox, or to break the host from inside."""
