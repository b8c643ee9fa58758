"""Files, written whole or not at all; downloads; models in other formats than folders."""
