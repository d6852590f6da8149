"""What every process of a run shares: tuning of the garbage collector, loading of user code, ends of processes."""
