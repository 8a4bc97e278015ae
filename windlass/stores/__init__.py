"""How the bytes of a layer's keys and values are held."""
