"""Which pairing the weights of a folder have: stated, or found out from them."""
