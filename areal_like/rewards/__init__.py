"""Rewards of responses: shipped verifiers, users' functions, and the processes that run them under a time limit.

Nothing is imported here, because the processes import modules of this package without configuration and tokenizers.
"""
