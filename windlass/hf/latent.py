"""Multi-head latent attention (MLA): a token's latent is held once, in place of the keys and values of all heads.

A head's key is a matrix of its own times the latent, beside channels that all heads share and that alone are rotated.
Its value is another matrix times the latent. The first matrix is applied to queries, the second to their outputs. So
attention runs over one kv head: its key is the shared channels and then the latent, its value the latent.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1, equations 9 to 19, and the absorbed matrices that it mentions.
"""

from collections.abc import Callable
from typing import Final, final

import torch
from torch import Tensor, nn

from windlass.core.errors import UnsupportedModel
from windlass.core.types import Attended, Queries
from windlass.hf.passes import AttributePatch
from windlass.hf.weights import is_plain

EXPAND: Final = "expand_kv"  # transformers' method that expands latents to keys and values
PROJECTION: Final = "kv_b_proj"  # and the module in it that holds the matrices
TOLERANCE: Final = 1e-2  # relative, of keys and values in 16 bits


@final
class Latent:
    """The latents of one attention module, whose `expand_kv` it stands in for while it is installed.

    `is_served` says whether the pass that runs now attends over latents.
    """

    def __init__(self, module: nn.Module, is_served: Callable[[], bool]) -> None:
        self._module, self._is_served = module, is_served
        self._heads = 0
        self._width = self._shared = 0  # key channels of each head, and key channels that all heads share
        self.rank = 0
        """Number of channels of a latent (0 until `check` has seen one)."""
        self.replaced = AttributePatch(module, EXPAND, self.expand_kv)

    def expand_kv(self, latents: Tensor, shared: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of the one kv head where they are to be attended to so, else those of all heads."""
        if self._is_served():
            return torch.cat((shared, latents), -1), latents
        keys, values = self.replaced.original(latents, shared)
        return keys, values

    def check(self, latents: Tensor, shared: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        """The key of the one kv head, for these of all heads.

        Raises: UnsupportedModel where they are not two matrices times the latent, and the shared channels.
        """
        self.rank, self._shared = latents.shape[-1], shared.shape[-1]
        self._heads, self._width = keys.shape[1], keys.shape[3] - self._shared
        nothing = self.replaced.original(torch.zeros_like(latents), torch.zeros_like(shared))
        to_keys, to_values = self._matrices(latents)
        own = torch.einsum("bgtr,hdr->bhtd", latents, to_keys), torch.einsum("bgtr,hdr->bhtd", latents, to_values)
        expected = torch.cat((own[0], shared.expand(-1, keys.shape[1], -1, -1)), -1), own[1]
        for states, its, without in zip((keys, values), expected, nothing, strict=True):
            is_equal = states.shape == its.shape and (states - its).norm() <= TOLERANCE * states.norm()
            if not is_equal or without.any():
                raise UnsupportedModel("makes keys and values out of a latent otherwise than by a matrix for each head")
        return torch.cat((shared, latents), -1)

    def queries(self, queries: Tensor) -> Queries:
        """Queries (batch, heads, tokens, channels of a head's key) as those of the one kv head."""
        own, shared = queries.split((self._width, self._shared), -1)
        to_keys, _ = self._matrices(queries)
        return torch.cat((shared, torch.einsum("bhtd,hdr->bhtr", own, to_keys)), -1)

    def values(self, read: Attended) -> Tensor:
        """Values (batch, heads, tokens, channels of a head's value) that each head reads, from its latents."""
        _, to_values = self._matrices(read)
        return torch.einsum("bhtr,hdr->bhtd", read, to_values)

    def _matrices(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """(heads, channels, rank) of each head's keys and of its values."""
        projection = getattr(self._module, PROJECTION, None)
        if projection is not None and is_plain(projection):
            matrices = projection.weight.unflatten(0, (self._heads, -1))
            return matrices[:, : self._width], matrices[:, self._width :]
        # Each latent channel alone, expanded by the module, gives a column of the matrices.
        each = torch.eye(self.rank, dtype=like.dtype, device=like.device)[None, None]
        keys, values = self.replaced.original(each, each.new_zeros(1, 1, self.rank, self._shared))
        return keys[0, ..., : self._width].mT, values[0].mT
