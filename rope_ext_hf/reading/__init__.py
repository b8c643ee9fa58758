"""Which text goes through the model, in fixed memory."""
