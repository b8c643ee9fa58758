"""Checkpoints on disk: which rows rotate, conversion, verification, detection."""
