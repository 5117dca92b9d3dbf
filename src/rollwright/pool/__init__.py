"""Who may use which machine, and for how long; see `base`."""
