"""One run: assembled from its checked configuration, started on its cluster, driven by the training loop."""
