"""The allocation language: text to syntax tree and back."""
