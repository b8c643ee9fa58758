"""Models and hidden states that do not fit the device."""
