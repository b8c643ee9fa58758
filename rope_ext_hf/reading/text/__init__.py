"""Documents from files, data sets and memory, as text and as tokens.

load: read a text by its name or from Python; `documents` has what it returns.
text_files, text_folders, csv_tables, in_memory: the kinds of sources.
tokenizing: the token ids of documents, and of what every input begins with.
token_bytes: the ids of several texts at once, and the bytes of each token, for bits per byte.
given_ids: documents that are token ids already.
unknown_tokens: warn of a text that the tokenizer does not know.
"""
