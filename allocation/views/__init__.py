"""Plans made visible: tables for a terminal, SVG of the grids, HTML for notebooks (`allocation/notebook.py`)."""
