"""Workflows: from a prompt to scored trajectories."""
