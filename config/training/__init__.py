"""Sections of a training run: each module has the section of its name."""
