"""Sandboxes: isolated process trees in which an episode runs commands of its model."""
