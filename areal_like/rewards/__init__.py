"""Reward of a response: shipped verifiers, users' functions, and the processes that run them under a time limit.

Nothing is imported here: those processes import modules of this package, and need neither configuration nor tokenizers.
"""
