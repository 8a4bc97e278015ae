"""Whether what the tensors of a prompt-cache file hold could have been written by `save`.

Their layouts were compared before. All functions raise: InconsistentFile.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from windlass.cache.options import CacheOptions
from windlass.cache.recall import TOKEN_INDEX as TOKEN_INDEX_STATE
from windlass.cache.recall_memory import RECALL
from windlass.cache.slot_table import STATE, STATISTICS
from windlass.core.limits import MAX_NUMBER
from windlass.core.places import PLACES
from windlass.core.rotary_index import EMPTY
from windlass.hf.linear_layer import STATES
from windlass.hf.prompt_cache_document import Contents, next_places
from windlass.hf.prompt_cache_fields import InconsistentFile
from windlass.hf.prompt_cache_layout import COLUMNS, POSITIONS, LayerPlan
from windlass.merge.state import MERGED
from windlass.policies import NAMES
from windlass.policies.query_means import COUNT
from windlass.stores.full_precision import SLOTS, TOKEN_INDEX, WRITTEN


def check_rows(contents: Contents, tensors: Mapping[str, Tensor], vocabulary: int) -> None:
    """Check the ids of the text, and the columns of each row."""
    rows = contents.standing
    if contents.has_tokens:
        for row in range(len(rows["tokens_seen"])):
            ids = tensors[f"tokens.{row}"]
            if ids.numel() and not (int(ids.min()) >= 0 and int(ids.max()) < vocabulary):
                raise InconsistentFile(f"row {row} has token ids that are not among the model's {vocabulary}")
    columns = [rows["columns_seen"]] * len(rows["tokens_seen"])
    if COLUMNS in tensors:
        columns = tensors[COLUMNS].tolist()
        if len(set(columns)) == 1 or min(columns) != rows["columns_seen"] or max(columns) > MAX_NUMBER:
            raise InconsistentFile(f"the columns of its rows are not {rows['columns_seen']} in one and more in another")
    for row, (seen, fed) in enumerate(zip(rows["tokens_seen"], columns, strict=True)):
        if seen > fed:
            raise InconsistentFile(f"row {row} has seen {seen} tokens in {fed} columns")


def check_states(tensors: Mapping[str, Tensor]) -> None:
    """Check that the states of recurrent layers are finite."""
    for name, tensor in tensors.items():
        if name.startswith(STATES) and not _is_finite(tensor):
            raise InconsistentFile(f"tensor {name} has numbers that are not finite")


def check_layer(plan: LayerPlan, contents: Contents, options: CacheOptions, tensors: Mapping[str, Tensor]) -> None:
    """Check that the numbers of a layer are finite, and that each row holds tokens that its text can have."""
    own = {name: tensors[plan.prefix + name] for name in plan.layouts}
    is_ours, has_known_numbers = contents.policy.name is not None, contents.policy.name in NAMES
    kept = {STATE + name for name in options.policy.needs.state}
    for name, tensor in own.items():
        # Only a policy from elsewhere, and one that notes scores of another, know which numbers they keep.
        is_free = name in kept or (name.startswith(STATISTICS) and not is_ours)
        if (
            (has_known_numbers or not is_free)
            and tensor.is_floating_point()
            and tensor.numel()
            and not _is_finite(tensor)
        ):
            raise InconsistentFile(f"tensor {plan.prefix + name} has numbers that are not finite")
        if (has_known_numbers or name not in kept) and name.startswith(STATE) and bool((tensor < 0).any()):
            raise InconsistentFile(f"tensor {plan.prefix + name} has numbers below 0")
    rows = contents.standing
    counts = own.get(STATISTICS + COUNT) if is_ours else None
    if counts is not None:
        most = counts.flatten(1).amax(1)
        if bool((counts < 0).any() or (most > counts.new_tensor(rows["tokens_seen"])).any()):
            raise InconsistentFile(f"layer {plan.index} has observed other numbers of tokens than were seen")
    for row in range(options.batch):
        text = _Text(row, *(rows[name][row] for name in ("tokens_seen", "next_positions", "since_edit")))
        positions = own[POSITIONS][row]
        _check_positions(plan, text, positions)
        if contents.has_places:
            _check_places(
                plan, text, positions, [own[STATE + name][row] for name in PLACES], next_places(contents)[row]
            )
        if STATE + MERGED in own:
            _check_merged(plan, text, positions, own[STATE + MERGED][row])
        if plan.rules.recalls:
            _check_recalled(plan, text, positions, own[STATE + TOKEN_INDEX_STATE][row], own[RECALL + POSITIONS][row])
        if WRITTEN in own:
            _check_ring(
                plan, text, positions, {name: own[name][row] for name in (SLOTS, TOKEN_INDEX, WRITTEN)}, options
            )
    if int((own[POSITIONS] >= 0).sum(-1).max()) < own[POSITIONS].shape[2] > 1:
        raise InconsistentFile(f"layer {plan.index} has more slots than tokens")


@dataclass(frozen=True)
class _Text:
    """Where the text of a row stands."""

    row: int
    seen: int
    end: int
    since_edit: int

    @property
    def edited_end(self) -> int:
        """Where the last edit left the text: from here on every token has a position of its own."""
        return self.end - self.since_edit


def _is_finite(tensor: Tensor) -> bool:
    low, high = tensor.aminmax()
    return bool(low.isfinite() and high.isfinite())


def _check_positions(plan: LayerPlan, text: _Text, positions: Tensor) -> None:
    """`positions` (score_heads, slots) are free, or of the text; held ones come first.

    After `divide` several tokens may stand at one position, but none that came after it.
    """
    where = f"layer {plan.index}, row {text.row}"
    if int(positions.min()) < EMPTY or int(positions.max()) >= text.end:
        raise InconsistentFile(f"{where} holds positions outside of its text, which goes on at {text.end}")
    is_held = positions >= 0
    if bool((is_held[:, 1:] & ~is_held[:, :-1]).any()):
        raise InconsistentFile(f"{where} has tokens behind free slots")
    ordered = positions.sort(-1).values
    is_double = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= text.edited_end) & (ordered[:, 1:] >= 0)
    if bool(is_double.any()):
        raise InconsistentFile(f"{where} holds a position twice in one head")
    since = (positions >= max(text.edited_end, 0)).sum(-1)
    if int((is_held.sum(-1) - since).max()) > text.seen - text.since_edit:
        raise InconsistentFile(f"{where} holds more tokens than were seen before its last edit")
    # An import holds no more than a sliding window shows, and nothing was evicted for that.
    window = plan.shape.most_visible
    kept = text.since_edit if window is None else min(text.since_edit, window - 1)
    if not plan.note.has_evicted and int(since.min()) < kept:
        raise InconsistentFile(f"{where} lacks tokens, though none was evicted")


def _check_recalled(plan: LayerPlan, text: _Text, positions: Tensor, index: Tensor, places: Tensor) -> None:
    """Each slot's token is the one that its `index` in the row names; `places` are the positions of all of these."""
    where, places = f"layer {plan.index}, row {text.row}", pad(places, (0, 1), value=EMPTY)
    if int(places.min()) < EMPTY or int(places.max()) >= text.end or bool((places[text.seen :] != EMPTY).any()):
        raise InconsistentFile(f"{where} recalls positions outside of its text, which goes on at {text.end}")
    named = index.where(positions >= 0, 0.0)
    if bool((named != named.floor()).any()) or int(named.max()) >= max(text.seen, 1):
        raise InconsistentFile(f"{where} holds other tokens than the {text.seen} that it may recall")
    stands = places.expand(len(positions), -1).gather(1, named.long())
    ordered = index.where(positions >= 0, -1.0).sort(-1).values
    is_double = (ordered[:, 1:] == ordered[:, :-1]) & (ordered[:, 1:] >= 0)
    if bool(((stands != positions) & (positions >= 0)).any() or is_double.any()):
        raise InconsistentFile(f"{where} holds tokens elsewhere than it would recall them")


def _check_places(plan: LayerPlan, text: _Text, positions: Tensor, places: list[Tensor], end: int) -> None:
    """`places`: where the tokens at `positions` are read, and how far their pictures reach, all of it up to `end`."""
    at, start, stop = (each.where(positions >= 0, 0.0) for each in places)
    is_whole = all(torch.equal(each, each.floor()) for each in (at, start, stop))
    is_inside = (start <= at) & (at < stop) & (stop <= end) | (positions < 0)
    if not (is_whole and bool(is_inside.all())):
        raise InconsistentFile(f"layer {plan.index}, row {text.row} reads tokens outside of its text, up to {end}")


def _check_merged(plan: LayerPlan, text: _Text, positions: Tensor, merged: Tensor) -> None:
    """`merged` (score_heads, slots): how many tokens each held one has taken in."""
    counts = merged.double().where(positions >= 0, 0.0)
    tokens = counts.sum(-1) + (positions >= 0).sum(-1)
    # Counts are float32, whose sums round from 2^24 on.
    if bool((counts < 0).any() or (counts != counts.floor()).any()) or float(tokens.max()) > text.seen * (1 + 1e-6):
        raise InconsistentFile(f"layer {plan.index}, row {text.row} has merged other than its {text.seen} tokens")


def _check_ring(
    plan: LayerPlan, text: _Text, positions: Tensor, ring: Mapping[str, Tensor], options: CacheOptions
) -> None:
    """The tokens in full precision are the first and the newest that were written, each with the slot of its codes."""
    where = f"layer {plan.index}, row {text.row}"
    owners, token_index, written = ring[SLOTS][:, :-1].long(), ring[TOKEN_INDEX], int(ring[WRITTEN])
    # Of an import a sliding layer was given the newest tokens alone.
    is_whole = plan.shape.most_visible is None
    least = text.since_edit if is_whole else 0
    if not least <= written <= text.seen or (is_whole and text.since_edit == text.seen != written):
        raise InconsistentFile(f"{where} has written {written} tokens of {text.seen}")
    if int(ring[SLOTS].min()) < -1 or int(ring[SLOTS].max()) >= positions.shape[1]:
        raise InconsistentFile(f"{where} has slots in full precision that it has not")
    sinks, newest = options.store.full_precision.sinks, options.store.full_precision.newest
    index, entries = token_index[:-1], torch.arange(len(token_index) - 1)
    size = max(len(entries) - sinks, 1)
    home = index.where(index < sinks, sinks + index % size)
    is_wrong = (index < -1) | (index > MAX_NUMBER) | ((index >= 0) & (home != entries))
    # Which token each entry has, if it is a first or one of the newest.
    latest = written - 1 - (written - 1 - (entries - sinks)) % size
    wanted = entries.where(entries < sinks, latest)
    is_wanted = (wanted < written) & ((entries < sinks) | (latest >= max(sinks, written - newest)))
    if bool((is_wrong | (is_wanted & (index != wanted))).any()) or int(token_index[-1]) != -1:
        raise InconsistentFile(f"{where} has other tokens in full precision than its first {sinks} and newest {newest}")
    held = positions.expand(len(owners), -1).gather(1, owners.clamp(min=0))
    is_owned = (owners >= 0) & (index >= 0) & (held >= 0)
    own = torch.where(held >= text.edited_end, index == written - text.end + held, index < written - text.since_edit)
    counts = torch.zeros_like(positions.expand(len(owners), -1)).scatter_add(
        1, owners.clamp(min=0), ((owners >= 0) & (index >= 0)).to(positions.dtype)
    )
    if bool((is_owned & ~own).any()) or int(counts.max()) > 1:
        raise InconsistentFile(f"{where} has tokens in full precision that are not those of their slots")
