"""What a run is, where it is kept, and how it is shown."""
