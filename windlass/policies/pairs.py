"""Neighbouring tokens that a measured table allows to merge, the cheapest first."""

import json
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass import kernels
from windlass.core.errors import PolicyError, UsageError
from windlass.core.files import read_bytes, replacing
from windlass.core.types import ModelInfo, Scores
from windlass.policies.base import TOKEN, ModelSpecific, Needs, Policy, Slots, lexsort_ranks, scatter_sorted

KIND: Final = "windlass pairs"
VERSION: Final = 1
AGAIN: Final = "Make it again with `windlass calibrate`"
MAX_COST: Final = 1e30  # nats
NAMES: Final = {"model": str, "fingerprint": str, "merge": str, "tokens": int, "seed": int}


@dataclass(frozen=True)
class PairTable:
    """`pairs` holds (first id, second id, times met, mean cost in nats), the cheapest first.

    `model` and `fingerprint` tell which model it was measured on, `merge` by which rule, `tokens` on how
    many pairs of a text.
    """

    model: str
    fingerprint: str
    merge: str
    tokens: int
    seed: int
    pairs: list[tuple[int, int, int, float]]


def write(table: PairTable, path: Path) -> None:
    """Write the file, whole or not at all. Raises: UsageError when it cannot be written."""
    document = {"kind": KIND, "version": VERSION, **asdict(table)}
    pairs = ",\n".join(json.dumps(pair) for pair in document.pop("pairs"))
    text = json.dumps(document)[:-1] + f', "pairs": [\n{pairs}\n]}}\n'
    try:
        with replacing(path.expanduser()) as temporary:
            temporary.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"-o {path} cannot be written: {error.strerror}. Give another name") from None


def read(path: Path) -> PairTable:
    """The table of a file. Raises: UsageError when it is missing, damaged, or of another version."""
    try:
        text = read_bytes(path.expanduser(), f"pair table {path}").decode("utf-8-sig")
    except UsageError as error:
        raise UsageError(f"{error}. {AGAIN}") from None
    except UnicodeDecodeError:
        raise UsageError(f"pair table {path} is not a file of `windlass calibrate`. {AGAIN}") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        what = "is cut short or damaged" if KIND in text[:64] else "is not a file of `windlass calibrate`"
        raise UsageError(f"pair table {path} {what}. {AGAIN}") from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise UsageError(f"pair table {path} is not a file of `windlass calibrate`. {AGAIN}")
    if document.get("version") != VERSION:
        raise UsageError(
            f"pair table {path} has format version {document.get('version')}, this windlass reads {VERSION}. {AGAIN}"
        )
    pairs = document.get("pairs")
    wrong = [name for name, kind in NAMES.items() if type(document.get(name)) is not kind]
    if wrong or not isinstance(pairs, list) or not pairs or not all(map(_is_pair, pairs)):
        raise UsageError(f"pair table {path} is damaged: no good {', '.join(wrong) or 'pairs'} in it. {AGAIN}")
    return PairTable(**{name: document[name] for name in NAMES}, pairs=[(a, b, n, float(x)) for a, b, n, x in pairs])


def _is_pair(pair: Any) -> bool:
    """Return True if it is two ids, a count and a cost."""
    if not isinstance(pair, list) or len(pair) != 4 or any(type(each) not in (int, float) for each in pair):
        return False
    *counts, cost = pair
    return all(type(each) is int and 0 <= each < 2**31 for each in counts) and 0 <= cost <= MAX_COST


ROUNDS: Final = 4  # of choosing pairs that share no token. The remaining pairs keep the order of the text
UNMERGED: Final = 2**62  # the priority of a token that must not be merged
# Prompt-cache files hold this state under its name, which must not change.
PAIR_RANK: Final = "place"  # state: 1 + the rank of a token and the next in the table (0: unknown, inf: absent)


@dataclass(frozen=True)
class _Lookup:
    """A table to search: pairs in the order of their ids, with the rank of each by cost.

    `at` holds ids (first << 32 | second) and ranks on each device where they were asked for: a copy at every step
    would hold up the device.
    """

    model: str
    fingerprint: str
    at: dict[torch.device, tuple[Tensor, Tensor]]

    @classmethod
    def of(cls, table: PairTable) -> "_Lookup":
        """Sort a table by ids."""
        pairs = sorted(table.pairs, key=lambda pair: pair[3])
        ids, order = torch.tensor([(first << 32) + second for first, second, *_ in pairs]).sort()
        return cls(table.model, table.fingerprint, {ids.device: (ids, (order + 1).float())})

    def ranks_of(self, first: Tensor, second: Tensor) -> Tensor:
        """1 + the rank of each pair of ids, or infinity where the table does not have it."""
        wanted = (first << 32) + second
        if wanted.device not in self.at:
            ids, ranks = next(iter(self.at.values()))
            self.at[wanted.device] = ids.to(wanted.device), ranks.to(wanted.device)
        ids, ranks = self.at[wanted.device]
        found = torch.searchsorted(ids, wanted).clamp(max=len(ids) - 1)
        known: Tensor = ranks[found]
        return known.where(ids[found] == wanted, torch.inf)


@dataclass(frozen=True)
class Pairs(Policy, ModelSpecific):
    """Evicts the first of two neighbours that `table`, a file of `windlass calibrate`, names: the cheapest first.

    With `merge="mean_count(next)"` the two become one merged token. Single tokens are merged into pairs first, then
    pairs into fours, where the tokens that meet are a pair of the table, and so on. Tokens in no such pair are evicted
    only when nothing else is left, the oldest first. So a table made from novels, which have no digits in them, keeps
    the digits of a pass key.

    Source: after an idea in the thread of llama.cpp PR 5719: merge only pairs of tokens from a table.
    Differs: the table is measured, not written by hand. Where costs rise along the text, a few merged tokens may grow
    too early when many tokens are evicted at once.
    """

    table: str

    needs = Needs(state=(TOKEN, PAIR_RANK), per_head=False)

    def __post_init__(self) -> None:
        _ = self._lookup  # a file that cannot be read fails here, not in the first step

    @cached_property
    def _lookup(self) -> _Lookup:
        try:
            return _Lookup.of(read(Path(self.table)))
        except UsageError as error:
            raise PolicyError(str(error)) from None

    def check(self, model: ModelInfo) -> None:
        name, measured = self._lookup.model, self._lookup.fingerprint
        hint = f"Make one for this model with `windlass calibrate`, in the same dtype ({model.dtype})"
        if name != model.name:
            raise PolicyError(f"pair table {self.table} was measured on a {name}, this is a {model.name}. {hint}")
        if measured != model.fingerprint():
            raise PolicyError(f"pair table {self.table} was measured on another {name}. {hint}")

    def score(self, slots: Slots) -> Scores:
        order = kernels.argsort_positions(slots.positions)
        positions = slots.positions.gather(-1, order).long()
        tokens, rank = (slots.state[name].gather(-1, order) for name in (TOKEN, PAIR_RANK))
        following = positions.roll(-1, -1)
        following[..., -1] = -1
        found = self._lookup.ranks_of(tokens.long(), tokens.long().roll(-1, -1))
        rank = found.where(following == positions + 1, rank)
        slots.state[PAIR_RANK].scatter_(-1, order, rank)
        can_merge = (positions >= slots.sinks) & (following < slots.next_positions[:, None, None] - slots.window)
        can_merge &= (following > positions) & (rank > 0) & rank.isfinite()
        return scatter_sorted(lexsort_ranks(merge_order(positions, rank.where(can_merge, 0).long())), order)


def merge_order(positions: Tensor, rank: Tensor) -> Tensor:
    """Merge priority per token, the lowest first, or `UNMERGED` where `rank` is 0, for pairs outside of the table.

    Smaller merges come first, by floor(log2(tokens of the merged group)), and of equal ones those of lower `rank`.
    Tokens are in the order of the text, and each is merged into the next one.
    """
    priority = torch.full_like(rank, UNMERGED)
    for _ in range(ROUNDS):
        key, before, after = _keys(positions, rank, priority)
        priority = priority.where((key >= before) | (key > after), key)
    return priority.where(priority < UNMERGED, _keys(positions, rank, priority)[0])


def _keys(positions: Tensor, rank: Tensor, priority: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Keys of each token without a priority, if it were merged next, and the keys of its neighbours."""
    slots = positions.shape[-1]
    index = torch.arange(slots, device=positions.device).expand_as(positions)
    is_left = priority == UNMERGED
    last = index.where(is_left, -1).cummax(-1).values
    first = index.where(is_left, slots).flip(-1).cummin(-1).values.flip(-1)
    before, after = pad(last[..., :-1], (1, 0), value=-1), pad(first[..., 1:], (0, 1), value=slots)
    # Padded by one on each side, so that each token has neighbours.
    before, after = before + 1, after + 1
    around = pad(positions, (1, 1), value=-1)
    size = around.gather(-1, after) - around.gather(-1, before)
    key = ((size - 1).float().frexp().exponent.long() << 32) + rank
    key = key.where(is_left & (rank > 0), UNMERGED)
    keys = pad(key, (1, 1), value=UNMERGED)
    return key, keys.gather(-1, before), keys.gather(-1, after)
