"""The pairing of the weights in a folder: as a config states it, or found out from the weights.

source_pairing: decide the pairing that a conversion reads, and check it against the weights.
detection: detect the pairing from the weights (`rope-ext detect`); `pairing_report` shows the result.
query_key_weights: the weights that detection looks at; source_weights, model_weights: read from a folder or a model.
text_losses: compare the losses of a text under both pairings.
right_calls: the calls that mend a folder whose config and weights contradict each other.
"""
