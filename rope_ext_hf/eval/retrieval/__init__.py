"""Runs that measure retrieval."""
