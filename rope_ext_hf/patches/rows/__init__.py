"""Which rows of a weight rotate, found out with the model itself."""
