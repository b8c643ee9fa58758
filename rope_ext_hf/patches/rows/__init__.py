"""The rows of a weight that rotate, found out by running a small model of the same class.

row_probe: run the model, and put together what the others find.
score_products, rotated_pairs: where queries meet keys, and which of their dims rotate together.
row_gradients, row_heads: which rows of a weight become these dims, and which heads the rows make up.
"""
