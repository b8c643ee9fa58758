"""cos and sin, and how vectors and cached keys are rotated by them."""
