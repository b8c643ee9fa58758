"""Pictures of results; plain numbers come in, a PNG or a page goes out."""
