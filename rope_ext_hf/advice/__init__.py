"""What to do for a longer context, by what was measured and published."""
