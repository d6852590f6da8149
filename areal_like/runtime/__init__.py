"""Code that every process of a run shares: tuning of the garbage collector, ends of processes, workers of user code."""
