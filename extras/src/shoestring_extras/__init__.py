"""Workloads on Shoestring's core that are no language models; one package a workload.

They import the core and are never imported by it: `shoestring run` finds their recipes by entry points.
"""

__version__ = "0.1.0"
