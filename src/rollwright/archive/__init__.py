"""What became of every rollout, kept for people; see `base`."""
