"""What training a patched model needs beside a trainer: a callback that stops where the model rotates otherwise."""

from rope_ext_hf.training.callback import RopeCallback

__all__ = ["RopeCallback"]
