"""Runs that measure perplexity."""
