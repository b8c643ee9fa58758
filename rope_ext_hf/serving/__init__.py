"""Serve what was measured: configs for serving engines, GGUF files, audits and advice."""
