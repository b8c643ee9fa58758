"""Exact blockwise attention for remapped positions."""
