"""Random damage to valid inputs, random command lines over them, and what must hold of every answer."""
