"""Long random programs, checked against a serial model; ``nox -s stress``."""
