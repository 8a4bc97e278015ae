"""How the bytes of a layer's keys and values are held.

`base` is the contract of a store, and says how to write one; `plain` and `low_bit` are the stores, `full_precision`
keeps some tokens of a low-bit store unquantised, and `spec` lists all stores by name.
"""
