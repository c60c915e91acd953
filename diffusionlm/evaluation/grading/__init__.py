"""Grading of answers: extraction, comparison, running of code, statistics of pairs. No torch."""
