"""Reading text: documents, the spans they are cut into, and the scoring of tokens in fixed memory."""
