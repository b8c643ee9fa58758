"""Pictures of results, made of plain numbers, as PNG files and in pages of HTML."""
