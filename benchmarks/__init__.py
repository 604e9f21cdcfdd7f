"""The benchmarks: each row has its limit, a peer if there is one, and kvladder's figure.

A module ``bench_<name>.py`` has a function ``rows()`` that yields each
:class:`~benchmarks.row.Row` as soon as it is measured. ``python -m benchmarks`` runs all modules.
"""

from benchmarks.row import Row as Row
