"""Ordering and completion. Everything but :mod:`.loops` and :mod:`.reaper` is sans-IO."""
