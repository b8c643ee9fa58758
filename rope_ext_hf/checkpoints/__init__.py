"""Checkpoints on disk: the rows that rotate, and conversion, verification and detection of their pairing."""
