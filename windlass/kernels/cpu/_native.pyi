"""The compiled module, see `module.cpp`. Tensors are passed by address, 0 for none."""

from typing import Any

from torch import Tensor

# data, scales, means, channels read, the first of them, channels held, bytes of a slot, ring at full precision, index
# into it, its entries, their format, and the logarithm of the channels of a group
PackedStates = tuple[int, int, int, int, int, int, int, int, int, int, int, int]

def instruction_sets() -> str: ...
def end_pool() -> None: ...
def attend(
    sizes: tuple[int, int, int, int, int, int],
    format: int,
    float_format: int,
    queries: int,
    strides: tuple[int, ...],
    keys: PackedStates,
    values: PackedStates,
    slot_positions: int,
    query_positions: int,
    rotary_index: tuple[int, int, int, int, int],
    tables: tuple[int, int, int, bool],
    query_gain: int,
    scale: float,
    softcap: float,
    visibility: tuple[int, int, int, int],
    sink_logits: int,
    log_counts: int,
    mass: tuple[int, int, int, int],
    out: int,
    some: int,
    instruction_set: str,
    threads: int,
) -> None: ...

# address, strides of rows and heads: of queries in numbers, of keys and values in bytes
NewStates = tuple[int, int, int]

# observed state, score, share, pool, whether it is the mean, budget, sinks, window
RetainArguments = tuple[int, int, float, int, bool, int, int, int]

# one line each: words and channels of keys, bytes and channels of values, their format, and the logarithms of the
# channels of a group of keys and of values
# the address of key means
# per piece keys, key scales, values, value scales, and tiles
# per piece of digests the largest, their scales, the least, their scales, and tiles, then the number of candidates
# positions of the store, their number in a row, and positions of recalled tokens
# cos, sin, pairs
# pages, and the number of the state
RecallArguments = tuple[
    tuple[int, int, int, int, int, int, int],
    int,
    list[tuple[int, int, int, int, int]],
    tuple[list[tuple[int, int, int, int, int]], int],
    tuple[int, int, int],
    tuple[int, int, int],
    tuple[int, int],
]

class Decode:
    def __init__(
        self,
        sizes: tuple[int, int, int, int, int, int],
        format: int,
        float_format: int,
        keys: PackedStates,
        values: PackedStates,
        tables: tuple[int, int, int, bool],
        rule: tuple[int, int, int, int, int],
        scale: float,
        softcap: float,
        visibility: tuple[int, int, int, int],
        retention: RetainArguments | None,
        recall: RecallArguments | None,
        instruction_set: str,
        /,
    ) -> None: ...
    def step(self, given: DecodeStep, threads: int, /) -> None: ...

class DecodeStep:
    def __init__(
        self,
        queries: NewStates,
        keys: NewStates,
        values: NewStates,
        positions: tuple[int, int],
        slot_positions: tuple[int, int],
        state: list[tuple[int, int]],
        written: int,
        out: int,
        mass: int,
        evicted: tuple[int, int],
        released: list[tuple[int, int, int]],
        recall: tuple[int, bool],
        row_sinks: int,
        pins: tuple[int, int],
        /,
    ) -> None: ...

def is_steady(cos: int, sin: int, rows: int, pairs: int, /) -> bool: ...
def rotate(
    sizes: tuple[int, int, int, int, int],
    format: int,
    float_format: int,
    states: PackedStates,
    positions: int,
    tables: tuple[int, int, int],
    out: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def encode(
    sizes: tuple[int, int, int, int, int],
    float_format: int,
    states: int,
    strides: tuple[int, ...],
    means: int,
    codes: int,
    scales: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def mean_key_cosine(
    sizes: tuple[int, int, int, int],
    format: int,
    keys: PackedStates,
    positions: int,
    out: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def expected(
    sizes: tuple[int, int, int, int, int, int],
    keys: int,
    means: int,
    covariances: int,
    turn: tuple[int, int],
    out: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def leverage(
    sizes: tuple[int, int, int, int],
    format: int,
    keys: int,
    is_counted: int,
    projection: int,
    ridge: float,
    out: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def redundancy(
    sizes: tuple[int, int, int],
    format: int,
    keys: PackedStates,
    positions: int,
    order: int,
    threshold: float,
    out: int,
    instruction_set: str,
    threads: int,
) -> None: ...

# inputs and outputs of a token, format, weights, scales, their format, (pairs, inputs of a group, outputs of a block,
# format and columns of the pairs, True if they lie by block, the code that is worth its zero, super-scales), bias
LinearLayer = tuple[int, int, int, int, int, int, tuple[int, int, int, int, int, bool, int, int], int]
# weights, width, epsilon, kind
Norm = tuple[int, int, float, int]

def linear(
    layer: LinearLayer, tokens: int, float_format: int, inputs: int, result: int, instruction_set: str, threads: int
) -> None: ...
def decode_weights(
    layer: LinearLayer, first: int, count: int, float_format: int, result: int, instruction_set: str, threads: int
) -> None: ...
def decode_outputs(
    layer: LinearLayer, outputs: int, count: int, float_format: int, result: int, instruction_set: str
) -> bool: ...
def norm_tokens(norm: Norm, tokens: int, float_format: int, inputs: int, result: int, instruction_set: str) -> None: ...

class DecoderLayer:
    def __init__(
        self,
        float_format: int,
        norms: tuple[Norm, Norm, Norm, Norm],
        linears: tuple[LinearLayer, ...],
        activation: int,
        instruction_set: str,
        /,
    ) -> None: ...
    def before(self, tokens: int, hidden: int, to: tuple[int, int, int], threads: int, /) -> None: ...
    def after(self, tokens: int, hidden: int, attended: int, result: int, threads: int, /) -> None: ...
    def norm(self, which: int, count: int, inputs: int, result: int, threads: int, /) -> None: ...
    def gate(self, count: int, gate: int, up: int, threads: int, /) -> None: ...

# a layer, its decode kernel, positions and state, rows and slots, budget (negative: none) with tokens held and whether
# any was evicted, whether the first state is observed, positions of a recall store and their number in a row, kv heads
# (none: all) with whether these are the first and the last of their layer
LayerArguments = tuple[
    DecoderLayer,
    Decode,
    tuple[int, list[int]],
    tuple[int, int],
    tuple[int, int, bool],
    bool,
    tuple[int, int],
    tuple[list[int], bool, bool],
]
# hidden, result, positions, next positions, starts, sinks of rows, pins and their ranges, tokens of any row at most
GivenArguments = tuple[int, int, int, int, int, int, tuple[int, int], int]
# written, evicted, evicted positions, state, mass, queries, keys
UndoArguments = tuple[int, int, int, int, int, int, int]

class DecoderSteps:
    # batch, heads, kv heads, channels of a head, numbers of `hidden`, bytes of a number
    def __init__(self, sizes: tuple[int, int, int, int, int, int], layers: list[LayerArguments], /) -> None: ...
    @property
    def count(self) -> int: ...
    def step(
        self, given: GivenArguments, undo: UndoArguments, released: list[tuple[int, int]], threads: int, /
    ) -> None: ...
    def take_back(self, given: GivenArguments, undo: UndoArguments, released: list[tuple[int, int]], /) -> None: ...
    def free(self, released: list[tuple[int, int]], /) -> None: ...

class Watch:
    def item(self, owner: dict[Any, Any], key: object, value: object, /) -> None: ...
    def no_item(self, owner: dict[Any, Any], key: object, /) -> None: ...
    def empty(self, owner: dict[Any, Any], key: object, /) -> None: ...
    def attribute(self, owner: object, name: str, value: object, /) -> None: ...
    def type(self, owner: object, kind: type, /) -> None: ...
    def address(self, tensor: Tensor, /) -> None: ...
    def is_unchanged(self) -> bool: ...

def best_pages(
    sizes: tuple[int, int, int, int, int, int, int, int, int],
    format: tuple[int, int],
    queries: tuple[int, int],
    pieces: list[tuple[int, int, int]],
    digests: list[tuple[int, int, int, int, int]],
    candidates: int,
    kept: tuple[int, int],
    best: tuple[int, int],
    instruction_set: str,
    threads: int,
) -> None: ...
def read_tokens(
    sizes: tuple[int, int, int, bool],
    pieces: list[tuple[int, int]],
    index: int,
    out: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def query_mass(
    sizes: tuple[int, int, int, int, int, int, int],
    room: tuple[int, int, int],
    format: int,
    queries: int,
    keys: int,
    mask: int,
    log_counts: int,
    lse: int,
    targets: int,
    scale: float,
    mass: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def first_free(positions: int, rows: int, slots: int, count: int, out: int) -> None: ...
def argsort_positions(positions: int, rows: int, slots: int, out: int, threads: int) -> None: ...
def lowest(
    sizes: tuple[int, ...],
    scores: int,
    positions: int,
    next_positions: int,
    limits: tuple[int, int, int, int],
    row_sinks: int,
    count: int,
    out: int,
    threads: int,
) -> None: ...
def write(sizes: tuple[int, ...], strides: tuple[int, ...], index: int, source: int, target: int) -> None: ...
