"""Plug-ins that engines load."""
