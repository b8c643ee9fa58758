"""Plug-ins that serving engines load: vLLM and SGLang."""
