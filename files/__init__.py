"""Atomic file writes, directory locks, names of paths, and output streams that may break. No torch."""
