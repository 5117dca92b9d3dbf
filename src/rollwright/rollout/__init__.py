"""Rollout factory: many rollouts at once, in groups, with deadlines; see `base`."""
