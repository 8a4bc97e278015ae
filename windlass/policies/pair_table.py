"""A file beside a model: at what cost its neighbouring tokens can be merged, pair by pair of token ids."""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from windlass.core.errors import UsageError
from windlass.core.files import read_bytes, replacing

KIND: Final = "windlass pairs"
VERSION: Final = 1
AGAIN: Final = "make it again with `windlass calibrate`"
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
        raise UsageError(f"-o {path} cannot be written: {error.strerror}; give another name") from None


def read(path: Path) -> PairTable:
    """The table of a file. Raises: UsageError when it is missing, damaged, or of another version."""
    try:
        text = read_bytes(path.expanduser(), f"pair table {path}").decode("utf-8-sig")
    except UsageError as error:
        raise UsageError(f"{error}; {AGAIN}") from None
    except UnicodeDecodeError:
        raise UsageError(f"pair table {path} is not a file of `windlass calibrate`; {AGAIN}") from None
    try:
        document = json.loads(text)
    except (ValueError, RecursionError):
        what = "is cut short or damaged" if KIND in text[:64] else "is not a file of `windlass calibrate`"
        raise UsageError(f"pair table {path} {what}; {AGAIN}") from None
    if not isinstance(document, dict) or document.get("kind") != KIND:
        raise UsageError(f"pair table {path} is not a file of `windlass calibrate`; {AGAIN}")
    if document.get("version") != VERSION:
        raise UsageError(
            f"pair table {path} has format version {document.get('version')}, this windlass reads {VERSION}; {AGAIN}"
        )
    pairs = document.get("pairs")
    wrong = [name for name, kind in NAMES.items() if type(document.get(name)) is not kind]
    if wrong or not isinstance(pairs, list) or not pairs or not all(map(_is_pair, pairs)):
        raise UsageError(f"pair table {path} is damaged: no good {', '.join(wrong) or 'pairs'} in it; {AGAIN}")
    return PairTable(**{name: document[name] for name in NAMES}, pairs=[(a, b, n, float(x)) for a, b, n, x in pairs])


def _is_pair(pair: Any) -> bool:
    """Whether it is two ids, a count and a cost."""
    if not isinstance(pair, list) or len(pair) != 4 or any(type(each) not in (int, float) for each in pair):
        return False
    *counts, cost = pair
    return all(type(each) is int and 0 <= each < 2**31 for each in counts) and 0 <= cost <= MAX_COST
