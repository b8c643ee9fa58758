"""Memory and time that reading takes."""
