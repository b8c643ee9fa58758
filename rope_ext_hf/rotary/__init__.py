"""cos and sin of a method, and the rotation of vectors and cached keys by them."""
