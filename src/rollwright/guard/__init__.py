"""What an agent may do; see `base`."""
