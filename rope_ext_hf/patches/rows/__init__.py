"""The rows of a weight that rotate, found out by running a small model of the same class."""
