"""Trials that run once before a patch is accepted, and refusals.

continuation_probe: try whether a decoder goes on from its cache as it reads in one forward.
refusals: refuse what would train or run a model without its method, or with the frequencies of a part of a row.
"""
