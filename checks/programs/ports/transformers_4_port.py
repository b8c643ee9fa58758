"""transformers 4, by the kit's own port: rotary modules of its models."""

from transformers_port import inv_freq, magnitude, version

__all__ = ["inv_freq", "magnitude", "version"]
