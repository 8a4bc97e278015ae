"""How the bytes of a layer's keys and values are held.

`base` is the contract of a store, and says how to write one. `formats` has the stores, and lists them by name, and
`full_precision` keeps some tokens of a low-bit store unquantised.
"""

from windlass.stores.base import Store as Store
from windlass.stores.formats import Int4 as Int4
from windlass.stores.formats import Int8 as Int8
from windlass.stores.formats import Plain as Plain
