"""Resharding: move every tensor from one mesh to another.

layouts.py says where the tiles of a tensor lie on a mesh, tasks.py which tile must reach whom, topology.py which links
there are, schedule.py who sends what when, and plan.py puts it together: transfers in order, the same on every rank.
reads.py says of stored copies from which one each box is read. None of these needs torch. dtensors.py reads the layouts
of DTensors, execute.py carries a plan out between ranks, exchange.py moves weights between jobs.
"""
