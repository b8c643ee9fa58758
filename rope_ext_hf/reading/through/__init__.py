"""How tokens go through a model: whole, in chunks, layer by layer; the losses of the head."""
