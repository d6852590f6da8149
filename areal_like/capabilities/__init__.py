"""Capabilities: folders that can each be deleted; see docs/capability.md."""
