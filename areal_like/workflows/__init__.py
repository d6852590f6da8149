"""How a prompt becomes scored trajectories."""
