"""One forward of a patched decoder: its hooks, row lengths, attention over remapped positions, and cache.

docs/internals.md shows a forward. Static methods pass through none of this.

forward_hooks, hooked_forward: hooks around a decoder's forward, also where `.forward(...)` is called directly; kernels
    that would run the model without its method are refused.
forward_call: what one forward was called with, and what its hooks worked out.
length_hooks: hooks of length-dependent methods, which also rotate the keys in a cache.
key_layout_probe: find out how a decoder keeps keys in its cache.
attention_hooks: hooks of remapping methods.
attention_function, attention_interface: the attention that the layers then run, and transformers' tables of them.
attention_probe: find out what each attention layer does with its rotary embedding.
"""
