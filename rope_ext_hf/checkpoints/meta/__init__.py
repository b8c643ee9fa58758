"""Checkpoints in the format of Meta's releases."""
