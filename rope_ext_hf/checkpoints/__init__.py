"""Checkpoints on disk: finding the rows that rotate, converting and detecting their pairing, and patched copies."""
