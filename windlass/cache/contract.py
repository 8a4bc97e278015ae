"""A check of the policy contract: a policy's declarations, and its behaviour in a small cache."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from windlass.cache.decode import LayerCall
from windlass.cache.layer import SlotLayer
from windlass.cache.recompute import second_pass
from windlass.core.errors import PolicyError
from windlass.core.positions import EMPTY
from windlass.core.step import AttentionCall, Limits, Step
from windlass.core.types import NewKeys, PerSlot, Queries, Scores
from windlass.policies import Needs, NewTokens, Observation, Policy, Slots
from windlass.policies.base import Budgeter, Initializer, ModelSpecific, OneShot, PerToken, Recency
from windlass.policies.wrappers import Wrapper, find, keeps_newest, scoring_chunk
from windlass.positions.modes import Original
from windlass.stores.formats import Plain

HEADS, KV_HEADS, HEAD_DIM, VALUE_DIM = 15, 3, 8, 6
LIMITS = Limits(budget=12, sinks=2, window=3, chunk=7, rollback=0)
MAX_ID = 97  # highest token id of a step
INTERFACES = (OneShot, Budgeter, ModelSpecific, Initializer, Recency)
# Tokens of each of two rows in every step: whole and ragged chunks, an idle row, then decode.
STEPS = ((7, 7), (4, 7), (7, 0), (5, 3), *((1, 1),) * 6, (0, 1), (1, 0), (7, 5), (1, 1))


def check_policy(policy: Policy) -> None:
    """Run `policy` through a small cache, until well over budget, and check that it keeps the contract.

    Uses neither a model nor files, and takes well under a second.

    Raises: PolicyError, naming the rule that is broken.
    """
    _check_declaration(policy)
    checked = _CheckingPolicy(policy)
    layer = SlotLayer(0, LIMITS, checked, None, Plain())
    draw = torch.Generator().manual_seed(0)
    at, prompt_ends = [0, 0], [0, 0]
    for lengths in STEPS:
        tokens = max(lengths)
        columns = torch.arange(tokens)
        positions = torch.stack([(columns + a).where(columns < n, EMPTY) for a, n in zip(at, lengths, strict=True)])
        at = [a + n for a, n in zip(at, lengths, strict=True)]
        prompt_ends = [a if tokens > 1 and n else end for a, n, end in zip(at, lengths, prompt_ends, strict=True)]
        ids = torch.randint(MAX_ID, positions.shape, generator=draw)
        step = Step(positions, lengths, torch.tensor(at), torch.tensor(prompt_ends), max(at), ids)
        queries, keys, values = (
            torch.randn(2, heads, tokens, width, generator=draw)
            for heads, width in ((HEADS, HEAD_DIM), (KV_HEADS, HEAD_DIM), (KV_HEADS, VALUE_DIM))
        )
        call = LayerCall(queries, keys, values, step, Original(), AttentionCall(scale=HEAD_DIM**-0.5))
        layer.step(call)
        if scoring_chunk(policy):
            later = positions.where(positions < 0, positions + tokens)
            again = replace(step, positions=later, end=step.end + tokens, is_second_pass=True)
            second_pass(layer, call._replace(step=again))


def _check_declaration(policy: Policy) -> None:
    """Check the class, its fields and its docstring, without running anything."""
    if not isinstance(policy, Policy):
        raise PolicyError(
            f"{policy!r} is not a Policy. Derive its class from windlass.policies.Policy, and pass an instance"
        )
    kind = type(policy)
    name = kind.__name__
    parameters = vars(kind).get("__dataclass_params__")  # of this class, not of one it inherits from
    if parameters is None or not parameters.frozen:
        raise PolicyError(f"{name} is not a frozen dataclass. Put @dataclass(frozen=True) above the class")
    declared: Any = policy  # a dataclass, as the check above has shown
    for field, value in ((field.name, getattr(policy, field.name)) for field in fields(declared)):
        is_file = isinstance(value, str) and Path(value).expanduser().is_file()
        if not (is_file or isinstance(value, int | float | Policy | None)):
            raise PolicyError(
                f"{name}.{field} is {value!r}. The fields of a policy are plain numbers, a policy, or a file's name"
            )
    needs: object = policy.needs
    if not isinstance(needs, Needs):
        raise PolicyError(f'{name}.needs is {needs!r}. Declare Needs, such as needs = Needs(state=("mass",))')
    for declared, names in (("state", needs.state), ("statistics", needs.statistics)):
        if not isinstance(names, tuple) or not all(isinstance(entry, str) for entry in names):
            raise PolicyError(f'{name}.needs.{declared} is {names!r}. Declare a tuple of names, such as ("mass",)')
    wanted = policy.observed_queries
    if wanted is not None and (not isinstance(wanted, int) or wanted < 0):
        raise PolicyError(f"{name}.observed_queries is {wanted!r}. Declare 0 (none), a positive number, or None (all)")
    for interface in INTERFACES:
        unused = [each for each in vars(interface) if not each.startswith("_") and each in dir(kind)]
        if unused and not issubclass(kind, interface):
            raise PolicyError(
                f"{name}.{unused[0]} is never used: {name} is no {interface.__name__}. Derive the class from "
                f"windlass.policies.{interface.__name__} too, or use another name"
            )
    missing = [word for word in ("Source:", "Differs:") if word not in (kind.__doc__ or "")]
    if missing:
        raise PolicyError(f"the docstring of {name} lacks {' and '.join(missing)}")


@dataclass(frozen=True, repr=False)
class _CheckingPolicy(Wrapper, ModelSpecific, Initializer, Recency):
    """A wrapper that checks its policy at every call. The cache treats it like the wrapped policy."""

    def __repr__(self) -> str:
        return repr(self.policy)

    @property
    def keeps_newest(self) -> bool:  # type: ignore[override]  # the wrapped policy decides
        return keeps_newest(self.policy)

    def preprocess(self, queries: Queries, keys: NewKeys, layer: int) -> NewTokens:
        trained = find(self.policy, ModelSpecific)
        if trained is None:
            return NewTokens(queries, keys)
        before = queries.clone(), keys.clone()
        new = trained.preprocess(queries, keys, layer)
        if not (queries.equal(before[0]) and keys.equal(before[1])):
            self._fail("preprocess writes into the model's queries or keys. Return copies")
        self._check_given("preprocess", new.state, keys)
        return new

    def initial_state(self, queries: Queries, keys: NewKeys, layer: int, heads: tuple[int, ...] | None) -> PerToken:
        initializer = find(self.policy, Initializer)  # type: ignore[type-abstract]  # none is made
        if initializer is None:
            return {}
        before = queries.clone(), keys.clone()
        state = initializer.initial_state(queries, keys, layer, heads)
        if not (queries.equal(before[0]) and keys.equal(before[1])):
            self._fail("initial_state writes into the model's queries or keys. Leave them as they are")
        self._check_given("initial_state", state, keys)
        return state

    def _check_given(self, method: str, state: PerToken, keys: NewKeys) -> None:
        """Check that a new token's state is declared, and one number for each token."""
        expected = (keys.shape[0], keys.shape[1] if self.needs.per_head else 1, keys.shape[2])
        for name, tensor in state.items():
            if name not in self.needs.state:
                self._fail(f"{method} gives state {name!r}, which is not declared in `state` {self.needs.state}")
            if tuple(tensor.shape) != expected:
                self._fail(f"{method} gives state {name!r} of shape {tuple(tensor.shape)}, expected {expected}")

    def observe(self, slots: Slots, observation: Observation) -> None:
        with self._watched("observe", slots):
            self.policy.observe(slots, observation)

    def score(self, slots: Slots) -> Scores:
        before = {name: tensor.clone() for name, tensor in slots.state.items()}
        again = replace(slots, state={name: tensor.clone() for name, tensor in before.items()})
        score = self._scored(slots)
        is_held = slots.positions >= 0
        if bool(score.isnan()[is_held].any()):
            self._fail("score gives NaN for a slot that holds a token")
        if not torch.equal(self._scored(again)[is_held], score[is_held]):
            self._fail("score differs between two calls with the same slots. Derive any draw from positions and a seed")
        reverse, order = _reversed(slots, before)
        expected, held = score.gather(-1, order)[is_held.flip(-1)], is_held.flip(-1)
        rounding = 1e-4 * float(expected.abs().max())
        if not torch.allclose(self._scored(reverse)[held], expected, rtol=1e-4, atol=rounding):
            self._fail("score depends on the order of the slots. Sort by slots.positions before pooling along the text")
        return score

    def _scored(self, slots: Slots) -> PerSlot:
        with self._watched("score", slots):
            score = _anything(self.policy.score(slots))
        expected = tuple(slots.positions.shape)
        if not isinstance(score, Tensor):
            self._fail(f"score gives {type(score).__name__}, expected a tensor of shape {expected}")
        if tuple(score.shape) != expected:
            self._fail(f"score has shape {tuple(score.shape)}, expected {expected} (batch, kv_heads, slots)")
        return score.float()

    @contextmanager
    def _watched(self, method: str, slots: Slots) -> Iterator[None]:
        """Check that a call changes nothing but the declared state, in place, and raises nothing."""
        before = {"positions": slots.positions.clone()}
        before |= {name: tensor.clone() for name, tensor in slots.store.tensors().items()}
        state, statistics = dict(slots.state), dict(slots.statistics)
        copies = {name: tensor.clone() for name, tensor in statistics.items()}
        try:
            yield
        except KeyError as error:
            if error.args[0] in self.needs.state:
                raise
            self._fail(f"{method} uses state {error.args[0]!r}, which is not declared in `state` {self.needs.state}")
        except Exception as error:
            raise PolicyError(f"{self!r}: {method} raises {type(error).__name__}: {error}") from error
        after = {"positions": slots.positions, **slots.store.tensors()}
        for name, tensor in before.items():
            if not torch.equal(tensor, after[name]):
                self._fail(f"{method} writes to slots.{name}. Only slots.state may be written")
        for name in slots.state:
            if name not in state:
                self._fail(f"{method} adds state {name!r}, which is not declared in `state` {self.needs.state}")
            if slots.state[name] is not state[name]:
                self._fail(f"{method} replaces slots.state[{name!r}]. Write into it, in place")
        for name, tensor in statistics.items():
            if not torch.equal(tensor, copies[name]):
                self._fail(f"{method} writes into slots.statistics[{name!r}]. Put a new tensor in its place")
        for name, tensor in slots.statistics.items():
            if name not in self.needs.statistics:
                self._fail(f"{method} adds statistics {name!r}, not declared in `statistics` {self.needs.statistics}")
            if method == "score" and tensor is not statistics.get(name):
                self._fail(f"score replaces slots.statistics[{name!r}]. Only observe may")

    def _fail(self, rule: str) -> NoReturn:
        raise PolicyError(f"{self!r}: {rule}")


def _anything(given: object) -> object:
    """Return `given` as an object of unknown type, so that its type is checked."""
    return given


def _reversed(slots: Slots, state: dict[str, Tensor]) -> tuple[Slots, Tensor]:
    """The same tokens in the opposite order of slots, and that order."""
    order = torch.arange(slots.positions.shape[-1]).flip(0).expand_as(slots.positions)
    store = Plain()
    store.restore({"keys": slots.keys().flip(2), "values": slots.values().flip(2)})
    flipped = {name: tensor.flip(-1) for name, tensor in state.items()}
    return replace(slots, store=store, positions=slots.positions.flip(-1), state=flipped), order
