"""One forward of a patched decoder: its arguments, row lengths, attention over remapped positions, and cache.

docs/internals.md shows a forward. Static methods pass through none of this.

patched_forward: the forward that stands in the place of a decoder's own, and of those of the modules around it.
decoders: find the decoders of a model, and put these forwards on them.
forward_call: one call of a decoder, with its arguments and what the forward works out from them.
length_forward: the forward under a length-dependent method.
cached_keys: the keys in a cache, which it rotates as rows grow.
key_layout_probe: find out how a decoder keeps keys in its cache.
remapping_forward: the forward under a remapping method.
token_positions: the positions and the padding of all its tokens.
attention_function, attention_interface: the attention that the layers then run, and transformers' tables of them.
attention_probe: find out what each attention layer does with its rotary embedding.
rotation_kernels: a check of fused kernels that would rotate the rows of a batch wrongly.
"""
