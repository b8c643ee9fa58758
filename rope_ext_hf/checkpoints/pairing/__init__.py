"""The pairing of the weights in a folder: as a config states it, or found out from the weights."""
