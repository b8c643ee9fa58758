"""Pictures of results, drawn from plain numbers, as PNG files and inside HTML pages."""
