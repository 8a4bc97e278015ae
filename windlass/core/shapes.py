"""Every tensor shape of the package, named once.

`ranked` is the axis along which slots may hold different tokens: 1 when a policy ranks all
heads of a row alike, else `kv_heads`.
"""

from jaxtyping import Bool, Float, Int
from torch import Tensor

TokenIds = Int[Tensor, "batch tokens"]
TokenMask = Bool[Tensor, "batch tokens"]
RowCounts = Int[Tensor, " batch"]

Queries = Float[Tensor, "batch heads tokens head_dim"]
NewKeys = Float[Tensor, "batch kv_heads tokens head_dim"]
NewValues = Float[Tensor, "batch kv_heads tokens value_dim"]
Attended = Float[Tensor, "batch heads tokens value_dim"]
QueryPositions = Int[Tensor, "batch tokens"]
ObservedColumns = Int[Tensor, "batch observed"]

SlotKeys = Float[Tensor, "batch kv_heads slots head_dim"]
SlotValues = Float[Tensor, "batch kv_heads slots value_dim"]
KeyCentres = Float[Tensor, "kv_heads head_dim"]
Scales = Float[Tensor, "batch kv_heads slots 1"]
SlotPositions = Int[Tensor, "batch ranked slots"]
SlotIndex = Int[Tensor, "batch ranked chosen"]
PerSlot = Float[Tensor, "batch kv_heads slots"]
Scores = Float[Tensor, "batch ranked slots"]

RotaryQueries = Int[Tensor, "batch ranked tokens"]
RotaryKeys = Int[Tensor, "batch ranked slots"]
RotaryTable = Float[Tensor, "length half_rotary_dim"]
