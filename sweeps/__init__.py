"""Grids of runs, each in a process of its own. No torch: a sweep knows runs by their configs and files alone."""
