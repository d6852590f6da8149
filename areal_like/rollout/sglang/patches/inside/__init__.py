"""Parts of patches that import SGLang at their top, so that patches import them in functions."""
