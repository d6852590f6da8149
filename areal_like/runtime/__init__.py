"""What every process of a run shares: tuning of the garbage collector, ends of processes, and those of user code."""
