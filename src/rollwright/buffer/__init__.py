"""Queue, ledger and checkpoints: what must survive a kill; see `base`."""
