"""Measurements: each states its limit, a peer where there is one, and what kvladder reaches.

A module ``bench_<name>.py`` has a function ``rows()`` that yields :class:`~benchmarks.row.Row` one
by one, as they are measured. ``python -m benchmarks`` runs them all.
"""

from benchmarks.row import Row as Row
