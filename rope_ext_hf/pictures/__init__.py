"""Pictures of RoPE, of what methods change in it, and of results; plain numbers come in, a PNG or a page goes out."""
