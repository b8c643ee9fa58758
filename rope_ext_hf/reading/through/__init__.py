"""Readers, which run tokens through a model: whole, in chunks or layer by layer; and the losses of its head."""
