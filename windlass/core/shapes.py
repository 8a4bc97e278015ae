"""Every tensor shape of the package, named once.

`score_heads` is the axis along which slots may hold different tokens: 1 where a policy gives one score to a token
for all heads of a row, else `kv_heads`.
"""

from jaxtyping import Bool, Float, Int, Num, UInt8
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
KeyMeans = Float[Tensor, "kv_heads head_dim"]
Scales = Float[Tensor, "batch kv_heads slots 1"]
IndexKeys = Float[Tensor, "batch slots index_channels"]
PickedSlots = Bool[Tensor, "batch tokens slots"]
SlotPositions = Int[Tensor, "batch score_heads slots"]
SlotIndex = Int[Tensor, "batch score_heads chosen"]
PerSlot = Float[Tensor, "batch kv_heads slots"]
Scores = Float[Tensor, "batch score_heads slots"]

LinearInputs = Float[Tensor, "*rows in_features"]
LinearOutputs = Float[Tensor, "*rows out_features"]
LinearWeights = Num[Tensor, "out_features in_features"]
CodeScales = Float[Tensor, " out_features"]
NibbleCodes = UInt8[Tensor, "out_features half_in_features"]
GroupPairs = Float[Tensor, "groups out_features 2"]
Bias = Float[Tensor, " out_features"]
NormWeights = Float[Tensor, " normed"]
Hidden = Float[Tensor, "batch tokens hidden"]
AttendedTokens = Float[Tensor, "batch tokens heads value_dim"]

RotaryQueries = Int[Tensor, "batch score_heads tokens"]
RotaryKeys = Int[Tensor, "batch score_heads slots"]
RotaryTable = Float[Tensor, "length half_rotary_dim"]
