"""Sandboxes: isolated process trees in which an episode runs its model's commands."""
