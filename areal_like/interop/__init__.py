"""Other systems: reading their configurations, and converting checkpoints."""
