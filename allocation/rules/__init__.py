"""Every constraint: one small function each, with its reason in the docstring and its source.

A rule's parameters name its inputs (`trainer`, `model`, `batch`, …); `registry.run_rules` runs those that have it.
"""
