"""Position modes: where a kept token's key is read, and the rotation that this takes.

`modes` has the position modes, and `MODES` by name: `Auto`, `Original`, `Compact`, `SelfExtend`, `Clamp`.
`position_mode` makes one of the text that a user typed. `rotary` takes cos and sin tables out of a model's own rotary
module (`Rotary`) and rotates a layer's states with them (`Rotation`).
"""

from windlass.positions.modes import Auto as Auto
from windlass.positions.modes import Clamp as Clamp
from windlass.positions.modes import Compact as Compact
from windlass.positions.modes import Original as Original
from windlass.positions.modes import PositionMode as PositionMode
from windlass.positions.modes import SelfExtend as SelfExtend
