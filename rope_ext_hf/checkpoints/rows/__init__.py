"""The rotated rows of a weight, and their order.

row_layouts: which rows of which tensors rotate, by the family table or by a probe of the class.
head_blocks: the rows as blocks of heads, and their order in each pairing.
loaded_rows: reorder the rows of a loaded model.
"""
