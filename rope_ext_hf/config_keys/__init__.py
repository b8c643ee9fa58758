"""What the rope keys of a config say, and the frequencies that engines compute from such numbers."""
