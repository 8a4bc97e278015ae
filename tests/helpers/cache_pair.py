"""A cache and its model side by side: each operation is done by both, then all that can be seen is compared."""

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from tests.helpers.cache_compared import Compared
from tests.helpers.cache_model_layer import Difference
from tests.helpers.cache_model_tokens import Mode
from tests.helpers.cache_setup import GROUP, HEAD_DIM, KV_HEADS
from tests.helpers.interrupts import interrupted_at
from windlass.core.errors import PromptCacheError, UsageError
from windlass.core.step import AttentionCall

Array = NDArray[Any]
Operation = tuple[str, int, int, int, int]  # a name, and numbers that are taken as the state of the pair allows
LONGEST = 3000  # positions: a text beyond starts anew
MOVING = ("interrupt", "rollback", "splice", "file")  # after these contents are always compared
MODES = (Mode("original"), Mode("compact"), Mode("self_extend", 3, 5), Mode("clamp", 9), Mode("auto"), Mode("auto"))


class Interrupt(BaseException):
    """Ends a pass, as Ctrl-C may."""


class Pair(Compared):
    """A cache and its model, which take the same passes."""

    def apply(self, operation: Operation) -> None:
        """Do one operation and compare. Raises: Difference."""
        name, *numbers = operation
        try:
            done = getattr(self, f"do_{name}")(*numbers)
        except Difference:
            raise
        except Exception as error:
            raise Difference(f"{operation} raises {type(error).__name__}: {error}") from error
        if done is False:
            self.skipped += 1
            return
        self.operations += 1
        self.compare()
        if numbers[0] % 5 == 0 or name in MOVING:
            self.compare_contents()

    # Passes

    def do_decode(self, a: int, b: int, c: int, d: int) -> None:
        """One token for each row, of which some are idle at times."""
        batch = self.cache.batch_size
        mask = [[(b >> row) % 4 != 0 or c % 3 != 0] for row in range(batch)]
        self.feed(mask, a, d)

    def do_draft(self, a: int, b: int, c: int, d: int) -> None:
        """A short step of several tokens, as of a draft that is checked."""
        columns = 2 + (b // 4 % 15 if b % 4 == 0 else b // 4 % 3)
        self.feed(self.ragged(1 if self.is_unseen() else columns, c, d), a, d)

    def is_unseen(self) -> bool:
        """Return True if a pass must be of one token, because only its end can be followed.

        The evictions between two tokens may be the cache's own choice, or one of two at one position. Merged tokens may
        be one code apart, and where words repeat, rounding chooses their targets.
        """
        is_coarse = self.setup.store != "plain" or self.setup.dtype == "bfloat16"
        is_followed = self.setup.merge is None or not (is_coarse or self.setup.repeats)
        return self.setup.policy == "random" or not is_followed or self.model.has_ties

    def do_prompt(self, a: int, b: int, c: int, d: int) -> None:
        """A step longer than any that is fed while decoding."""
        self.feed(self.ragged(17 + b % 14, c, d), a, d)

    def ragged(self, columns: int, c: int, d: int) -> list[list[bool]]:
        """Rows of different lengths, padded at either end. Two of three times there is no padding."""
        batch = self.cache.batch_size
        if c % 3:
            return [[True] * columns] * batch
        lengths = [(c // 3 + 7 * row * (d % 5)) % (columns + 1) for row in range(batch)]
        left = d % 2 == 0
        return [[(columns - n <= at) if left else at < n for at in range(columns)] for n in lengths]

    def states(self, seed: int, columns: int) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Queries, keys and values of each layer, made up."""
        batch, random = self.cache.batch_size, np.random.default_rng(seed)
        result = []
        for _ in self.calls:
            numbers = random.standard_normal((batch, KV_HEADS * (GROUP + 2), columns, HEAD_DIM), dtype=np.float32)
            if self.setup.repeats:
                words = np.random.default_rng(1).standard_normal((5, KV_HEADS, HEAD_DIM), dtype=np.float32)
                spoken = words[random.integers(5, size=(batch, columns))].transpose(0, 2, 1, 3)
                numbers[:, KV_HEADS * GROUP : KV_HEADS * (GROUP + 1)] = spoken
            tensor = torch.from_numpy(numbers).to(self.setup.torch_dtype)
            result.append(tuple(tensor.split([KV_HEADS * GROUP, KV_HEADS, KV_HEADS], 1)))
        return result

    def feed(self, mask: list[list[bool]], seed: int, d: int) -> None:
        columns = len(mask[0])
        if max(self.model.ends, default=0) + columns > LONGEST:
            self.reset()
        states = self.states(seed, columns)
        ids = None if d % 97 == 0 else np.random.default_rng(seed).integers(31, size=(len(mask), columns))
        is_whole = all(all(row) for row in mask)
        given = None
        if d % 7 == 0:
            given = torch.tensor(self.model.positions(mask)).clamp(min=0)
        if d % 31 == 1 and any(mask[-1]):
            wrong = torch.tensor(self.model.positions(mask)) + 1
            if not is_refused(lambda: self.begin(mask, None, wrong)):
                raise Difference("wrong positions were taken")
        outs = self.run(
            None if is_whole and d % 2 else mask, columns, states,
            None if ids is None else torch.from_numpy(ids), given,
        )  # fmt: skip
        self.follow(mask, None if ids is None else ids.tolist(), states, outs)

    def reset(self) -> None:
        self.cache.reset()
        self.model.reset()

    def begin(self, mask: list[list[bool]], ids: Tensor | None, positions: Tensor | None) -> None:
        self.cache.begin(len(mask), len(mask[0]), torch.tensor(mask), positions, ids)

    def run(
        self, mask: list[list[bool]] | None, columns: int, states: list[tuple[Tensor, Tensor, Tensor]],
        ids: Tensor | None, positions: Tensor | None = None, broken_at: int = -1,
    ) -> list[Tensor]:  # fmt: skip
        """A pass, as an attached model makes it. It ends in an interrupt before layer `broken_at`."""
        with self.noting():
            return self.run_pass(mask, columns, states, ids, positions, broken_at)

    def run_pass(
        self, mask: list[list[bool]] | None, columns: int, states: list[tuple[Tensor, Tensor, Tensor]],
        ids: Tensor | None, positions: Tensor | None, broken_at: int,
    ) -> list[Tensor]:  # fmt: skip
        before, outs = self.cache.text, []
        try:
            real = None if mask is None else torch.tensor(mask)
            self.cache.begin(self.cache.batch_size, columns, real, positions, ids)
            for at, (own, call) in enumerate(zip(states, self.calls, strict=True)):
                if at == broken_at:
                    raise Interrupt
                outs.append(self.cache.attend(at, *own, call))
            if broken_at == len(states):
                raise Interrupt
            self.cache.commit()
        except BaseException:
            self.cache.take_back(before)
            raise
        return outs

    def follow(
        self, mask: list[list[bool]], ids: list[list[int]] | None, states: list[tuple[Tensor, Tensor, Tensor]],
        outs: list[Tensor],
    ) -> None:  # fmt: skip
        """Let the model take the same pass, and compare the outputs of each layer."""
        self.expect()
        truths = self.model.pass_of(mask, ids, self.kinds, self.arrays(states))
        for at, ((out,), truth) in enumerate(zip(self.split([(out,) for out in outs]), truths, strict=True)):
            apart = np.abs(out.double().numpy() - truth)
            worst = float(apart.max(initial=0.0))
            layer = self.model.layers[at]
            self.model.counts.resettled += int(layer.is_doubtful)
            if not layer.is_doubtful and not worst <= self.bound(len(mask[0]), truth, at):
                place = np.unravel_index(int(apart.argmax()), apart.shape)
                raise Difference(f"layer {at} reads off by {worst:.2g} at (row, head, column, channel) {place}")
            layer.is_doubtful = False
        self.adopt_merges()

    def arrays(self, states: Sequence[tuple[Tensor, ...]]) -> list[tuple[Array, Array, Array]]:
        """Queries, keys and values, as the model takes them."""
        return [tuple(each.double().numpy() for each in own) for own in self.split(states)]  # type: ignore[misc]  # three

    def bound(self, columns: int, truth: Array, layer: int) -> float:
        """Largest difference of outputs by rounding.

        In bfloat16 probabilities are rounded, and in long steps the rotated keys, too.
        """
        largest = max(1.0, float(np.abs(truth).max(initial=0.0)))
        if self.setup.dtype == "float32":
            return 5e-5 * largest
        # Sums of merged values exceed the values read. Tokens spliced in from another store may be a code apart.
        held = [np.abs(t.value).max() for lists in self.model.layers[layer].held for own in lists for t in own]
        largest = max([largest, *held])
        return (0.15 if columns > 16 or self.setup.store != "plain" else 2.0**-7) * largest

    def do_interrupt(self, a: int, b: int, c: int, d: int) -> bool | None:
        """A pass that an interrupt ends: before some layer, or at some line of the package."""
        columns = 1 if self.is_unseen() else (1, 1, 3, 9, 20)[b % 5]
        if max(self.model.ends) + columns > LONGEST:
            return False
        states, mask = self.states(a, columns), self.ragged(columns, c, d)
        ids = torch.from_numpy(np.random.default_rng(a).integers(31, size=(len(mask), columns)))
        if c % 4:
            is_done = not interrupted(lambda: self.run(mask, columns, states, ids, None, d % (len(states) + 1)))
            assert not is_done, "an interrupt that did not come"
        elif not interrupted_at(1 + d % 400, lambda: self.run(mask, columns, states, ids)):
            self.expect()
            self.model.pass_of(mask, ids.tolist(), self.kinds, self.arrays(states))
            self.adopt_merges()
            return None
        self.model.interrupted()
        return None

    def do_model(self, a: int, b: int, c: int, d: int) -> bool | None:
        """A pass of the real model, whose queries, keys and values the model of the cache takes, too."""
        columns = 1 if self.is_unseen() else (1, 3, 20)[b % 3]
        if self.setup.dtype != "float32" or max(self.model.ends) + columns > LONGEST:
            return False
        mask, fed = self.ragged(columns, c, d), []
        ids = torch.from_numpy(np.random.default_rng(a).integers(31, size=(len(mask), columns)))
        twin = copy.deepcopy(self.cache)  # in which layers are called one by one
        attend = twin.attend

        def noted(layer: int, queries: Tensor, keys: Tensor, values: Tensor, call: AttentionCall) -> Tensor:
            out = attend(layer, queries, keys, values, call)
            fed.append(((queries, keys, values), out, call))
            return out

        twin.attend = noted  # type: ignore[method-assign]  # of this one object
        twin.fused_decode = lambda *_: None  # type: ignore[method-assign]  # likewise
        given = {"input_ids": ids, "attention_mask": torch.tensor(mask).long()}
        with torch.no_grad(), self.noting(twin):  # a step of all layers in one call cannot be noted
            by_layer = self.setup.its_model(**given, past_key_values=twin).logits
        with torch.no_grad():
            logits = self.setup.its_model(**given, past_key_values=self.cache).logits
        assert torch.equal(logits, by_layer), "all layers in one call"
        for layer, leaf, kind in zip(self.model.layers, self.model.leaves, self.kinds, strict=True):
            call = fed[leaf.layer][2]
            layer.this_pass = replace(
                kind, scale=call.scale, sliding_window=call.sliding_window, softcap=call.softcap, sink_logits=None
            )
        self.follow(mask, ids.tolist(), [states for states, _, _ in fed], [out for _, out, _ in fed])
        for layer in self.model.layers:
            layer.this_pass = None
        self.compare_model(mask, ids, logits, fed)
        return None

    def compare_model(
        self, mask: list[list[bool]], ids: Tensor, logits: Tensor, fed: Sequence[tuple[tuple[Tensor, ...], Tensor, Any]]
    ) -> None:
        """Compare everything but attention: a plain model with the same adapters, given the attention outputs."""
        is_token = torch.tensor(mask)
        truth, replayed = self.setup.twin.read(ids, [out for _, out, _ in fed])
        pairs = [("logits", logits[is_token], truth[is_token])]
        for at, ((states, _, _), own) in enumerate(zip(fed, replayed, strict=True)):
            for name, ours, theirs in zip(("queries", "keys", "values"), states, own[:3], strict=True):
                mine, its = (each.transpose(1, 2)[is_token] for each in (ours, theirs))
                pairs.append((f"{name} of layer {at}", mine, its))
        for name, ours, theirs in pairs:
            apart = float((ours - theirs).abs().max()) if ours.numel() else 0.0
            if not apart <= 1e-4 * max(1.0, float(theirs.abs().max()) if theirs.numel() else 0.0):
                raise Difference(f"{name} are off by {apart:.2g}")


def is_refused(work: Callable[[], object]) -> bool:
    try:
        work()
    except (UsageError, PromptCacheError):
        return True
    return False


def interrupted(work: Callable[[], object]) -> bool:
    try:
        work()
    except Interrupt:
        return True
    return False
