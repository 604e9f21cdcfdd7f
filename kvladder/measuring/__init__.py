"""Measures a medium through its tier, beside the medium's own limit in the same run."""
