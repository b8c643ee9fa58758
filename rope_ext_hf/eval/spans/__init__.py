"""Measurements over spans of text: what they have in common, and perplexity."""
