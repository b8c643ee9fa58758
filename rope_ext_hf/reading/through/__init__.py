"""Readers, which run tokens through a model: whole, in chunks or layer by layer; and the losses of its head.

chunk_check: try on a few tokens which way gives the logits of an ordinary forward.
whole_reader: one forward for all tokens.
chunked_reader, chunked_attention, span_cache: chunks of tokens onto a cache.
layer_reader: all chunks through one layer after the other.
head_losses: logits and losses, a part of the vocabulary at a time.
"""
