"""The rotated rows of a weight, and their order."""
