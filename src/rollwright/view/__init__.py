"""What people see of a run folder, whichever state the run is in."""
