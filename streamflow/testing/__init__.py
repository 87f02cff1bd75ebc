"""Tools for testing: the backend contract suite to subclass."""
