"""A cache whose keys are stored rotated, as most libraries store them: the baseline of a benchmark."""

from dataclasses import replace

from torch import Tensor

from windlass.cache.state import CacheState
from windlass.core.errors import UsageError
from windlass.core.shapes import TokenIds, TokenMask
from windlass.hf.kv_cache import KVCache
from windlass.positions.modes import Auto, Original, PositionMode, position_mode

HINT = "use a KVCache, which stores keys un-rotated"


class RotatedStorage(KVCache):
    """A `KVCache` in all but one thing: the model's own rotary module rotates a key before it is stored.

    The same kernels read it and rotate nothing. So a run beside a `KVCache` shows the cost of rotating
    keys at every read. A stored key can be read at its own position only; whatever would move
    it is refused, and so is padding. Policies that look at keys are given rotated ones.

    "auto" is "original" here, however long the text.

    Raises: UsageError for other positions; for a policy that keeps statistics of queries, which
    it would be shown rotated; for a model that rotates neighbouring channels: then keys of transformers' and ours
    are laid out differently.
    """

    is_rotated = True

    def reset(self) -> None:
        self.positions = self.options.positions
        policy = self.options.policy
        if policy.needs.statistics:
            raise UsageError(
                f"policy {policy!r} keeps statistics of un-rotated queries, and with rotated storage queries come "
                f"rotated; {HINT}"
            )
        if any(rotary is not None and rotary.layout.is_interleaved for rotary in self.rotaries):
            raise UsageError(f"rotated storage is for models whose channel pairs are halves; {HINT}")
        if any(rotary is not None and rotary.norm_weights is not None for rotary in self.rotaries):
            raise UsageError(f"rotated storage is not for models with weights of norms after RoPE; {HINT}")
        super().reset()
        for layer in self.layers:
            layer.rotary = None

    @property
    def positions(self) -> PositionMode:
        """Always "original"."""
        return self.options.positions

    @positions.setter
    def positions(self, mode: str | PositionMode) -> None:
        self.options = replace(self.options, positions=_check_mode(position_mode(mode)))

    def begin(
        self,
        batch: int,
        tokens: int,
        mask: TokenMask | None,
        positions: Tensor | None,
        ids: TokenIds | None,
        axes: Tensor | None = None,
    ) -> None:
        """See `KVCache.begin`. The model counts columns, so these must be the positions.

        Raises: UsageError where they are not: padding, or rows rolled back to different lengths.
        """
        step = self.next_pass.step
        if (mask is not None and not bool(mask.all())) or (step is not None and not all(step.lengths)):
            raise UsageError(f"rotated storage takes no padding; {HINT}")
        if any(at != self.columns_seen for at in self.next_positions):
            raise UsageError(f"with rotated storage all rows must go on at {self.columns_seen}; {HINT}")
        super().begin(batch, tokens, mask, positions, ids, axes)

    def drop(self, start: int, end: int, row: int | None = None) -> None:
        if any(start < at <= end for at in self.next_positions):
            raise _moved("drop of the newest tokens")
        super().drop(start, end, row)

    def keep(self, start: int, end: int, row: int | None = None) -> None:
        if any(end < at for at in self.next_positions):
            raise _moved("keep without the newest tokens")
        super().keep(start, end, row)

    def shift(self, start: int, end: int, by: int, row: int | None = None) -> None:
        raise _moved("shift")

    def divide(self, start: int, end: int, by: int, row: int | None = None) -> None:
        raise _moved("divide")

    def splice(self, other: CacheState, source: int = 0, row: int = 0, at: int | None = None) -> None:
        raise _moved("splice")


def _check_mode(mode: PositionMode) -> PositionMode:
    if isinstance(mode, Auto):
        return Original()
    if not isinstance(mode, Original):
        raise UsageError(f'rotated storage reads at positions="original" only, got "{mode}"; {HINT}')
    return mode


def _moved(edit: str) -> UsageError:
    return UsageError(f"{edit} would move positions, and rotated keys stay where they were stored; {HINT}")
