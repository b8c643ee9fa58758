"""Reading of text: documents, the spans (stretches of tokens read at once) they are cut into, and their scoring.

protocols: the window, the stride, and which tokens are scored.
spans: plan what is read: load and tokenise documents, and cut them into spans by a protocol.
scorer: the losses of tokens under a model.

Folders that these modules use:
    text: documents from files, data sets and memory.
    through: run tokens through a model: whole, in chunks or layer by layer.
    larger: models and hidden states that do not fit the device.
    cost: memory and time.
"""
