"""What engines load."""
