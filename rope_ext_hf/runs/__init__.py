"""Runs: what they measure, their folders, their results, and the conclusions from them."""
