"""One folder a method family, in the order of its paper: kernels, Formats, hooks, stages, recipes, README.

The core imports nothing from here; it finds a method's Formats, recipes and reducers by the entry points in
pyproject.toml, as it finds those of anybody's package (plugins.py).
"""
