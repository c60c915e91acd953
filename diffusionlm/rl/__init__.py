"""Reinforcement learning: rollouts, rewards, log-probabilities of answers, and policy objectives."""
