"""Servers, requests to them, and which of their samples are trained on when."""
