"""Whether a running server computes what was measured, and vLLM as a reader."""
