"""Atomic file writes, directory locks and output streams that may break. No torch."""
