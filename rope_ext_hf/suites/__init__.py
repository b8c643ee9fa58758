"""What a long prompt asks; nothing here knows a model."""
