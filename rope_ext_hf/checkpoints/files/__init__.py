"""Files of weights: safetensors, torch files, and what else lies beside them."""
