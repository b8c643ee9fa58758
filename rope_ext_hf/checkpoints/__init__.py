"""Checkpoints on disk: finding the rows that rotate, and converting, verifying and detecting their pairing."""
