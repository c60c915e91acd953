"""Atomic file writes, directory locks, names of paths, errors of usage, and output streams that may break. No torch."""
