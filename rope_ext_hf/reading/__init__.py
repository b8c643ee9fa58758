"""Reading of text: documents, the spans (stretches of tokens read at once) they are cut into, and their scoring."""
