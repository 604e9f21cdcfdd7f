"""Measurements: each row states a limit, a peer where there is one, and kvladder's result.

A module ``bench_<name>.py`` has a function ``rows()`` that yields each
:class:`~benchmarks.row.Row` as soon as it is measured. ``python -m benchmarks`` runs them all.
"""

from benchmarks.row import Row as Row
