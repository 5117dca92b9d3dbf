"""How weights travel from trainer to engines; see `base`."""
