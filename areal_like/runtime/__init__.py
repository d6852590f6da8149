"""What every process of a run shares: tuning of the garbage collector, and loading of user code."""
