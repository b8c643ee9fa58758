"""Files, written whole or not at all; downloads; GGUF files."""
