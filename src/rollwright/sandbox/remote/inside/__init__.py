"""What runs in a remote sandbox; uploaded as it is, so: standard library only."""
