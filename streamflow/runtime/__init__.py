"""Ops, arrays, streams and kernels of one device."""
