"""How a method gets into a live model and out again; see `rope_ext_hf.patches.patching`."""
