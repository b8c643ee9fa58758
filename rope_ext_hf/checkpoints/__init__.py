"""Checkpoints on disk: finding the rows that rotate, converting and detecting their pairing, and patched copies.

conversion: convert a folder between half, interleaved and Meta's format. `opening` opens it in the format that it is
    in, and `source` checks it first.
verification, report: check what a conversion wrote, and say what it was.
live_model: convert a loaded model.
folder_copies: patched copies of a folder, whose weights are not read.

Folders that these modules use:
    rows: which rows of a tensor rotate, and their order in each pairing.
    pairing: the pairing that a config states, or that the weights show.
    files: weights, read one tensor at a time, and which other files a copy gets.
    meta: Meta's format.
"""
