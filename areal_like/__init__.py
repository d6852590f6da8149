"""An asynchronous reinforcement-learning engine for language models."""
