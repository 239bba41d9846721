"""A lowered slice as source text: one printer for each kind of device."""
