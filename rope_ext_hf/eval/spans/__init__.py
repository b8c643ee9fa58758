"""Measurements over spans of text: what they have in common, and perplexity.

Windows, strides and the choice of scored tokens are in `rope_ext_hf.reading.protocols`.

span_measurement: pass the spans of documents through a model, and sum up what they give.
perplexity_measurement: losses.
perplexity_runs: perplexity from the losses, and its tables.
"""
