"""Plug-ins of this package for vLLM and SGLang, with which these engines run RoPE with any frequencies."""
