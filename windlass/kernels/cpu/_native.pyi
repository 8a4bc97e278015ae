"""The compiled module, see `module.cpp`. Tensors are passed by address, 0 for none."""

# data, scales, means, channels that are meant, the first of them, all that are held, bytes of a slot; ring at full
# precision, index into it, its entries, their format
PackedStates = tuple[int, int, int, int, int, int, int, int, int, int, int]

def instruction_sets() -> str: ...
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
    instruction_set: str,
    threads: int,
) -> None: ...

# address, strides of rows and heads: of queries in numbers, of keys and values in bytes
NewStates = tuple[int, int, int]

class Decode:
    def __init__(
        self,
        sizes: tuple[int, int, int, int, int, int],
        format: int,
        float_format: int,
        keys: PackedStates,
        values: PackedStates,
        slot_positions: int,
        tables: tuple[int, int, int, bool],
        scale: float,
        softcap: float,
        visibility: tuple[int, int, int, int],
        state: list[tuple[int, float]],
        instruction_set: str,
        /,
    ) -> None: ...
    def step(
        self,
        queries: NewStates,
        keys: NewStates,
        values: NewStates,
        positions: int,
        written: int,
        out: int,
        mass: int,
        threads: int,
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
def linear(
    sizes: tuple[int, int, int],
    format: int,
    float_format: int,
    inputs: int,
    weights: int,
    scales: int,
    scale_format: int,
    groups: tuple[int, int, int],
    bias: int,
    result: int,
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
    count: int,
    out: int,
    threads: int,
) -> None: ...
def write(sizes: tuple[int, ...], strides: tuple[int, ...], index: int, source: int, target: int) -> None: ...
