"""An engine behind HTTP: what `rollwright serve` runs; see `server`."""
