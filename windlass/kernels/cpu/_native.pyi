"""The compiled module, see `module.cpp`. Tensors are passed by address, 0 for none."""

# codes, scales, centres, channels, bytes of a slot; exact copies, places, count of places, their format
Held = tuple[int, int, int, int, int, int, int, int, int]

def instruction_sets() -> str: ...
def attend(
    sizes: tuple[int, int, int, int, int, int],
    format: int,
    number: int,
    queries: int,
    strides: tuple[int, ...],
    keys: Held,
    values: Held,
    slot_positions: int,
    query_positions: int,
    reading: tuple[int, int, int, int, int],
    tables: tuple[int, int, int],
    scale: float,
    softcap: float,
    visibility: tuple[int, int, int],
    sink_logits: int,
    log_counts: int,
    mass: tuple[int, int, int, int],
    out: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def turn(
    sizes: tuple[int, int, int, int, int],
    format: int,
    number: int,
    held: Held,
    positions: int,
    tables: tuple[int, int, int],
    out: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def typicality(
    sizes: tuple[int, int, int, int],
    format: int,
    keys: Held,
    positions: int,
    out: int,
    instruction_set: str,
    threads: int,
) -> None: ...
def first_free(positions: int, rows: int, slots: int, count: int, out: int) -> None: ...
def text_order(positions: int, rows: int, slots: int, out: int, threads: int) -> None: ...
def lowest(
    sizes: tuple[int, ...],
    scores: int,
    positions: int,
    next_positions: int,
    limits: tuple[int, int, int],
    count: int,
    out: int,
    threads: int,
) -> None: ...
def write(sizes: tuple[int, ...], strides: tuple[int, ...], index: int, source: int, target: int) -> None: ...
