"""The adapter to lm-evaluation-harness, which only `adapter` imports."""
