"""Measurements over spans of text, to build on."""
