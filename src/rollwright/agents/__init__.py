"""Who acts: the tool-using agent, teams later; see `base`."""
