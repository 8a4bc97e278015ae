"""The bars for Windlass on a GPU, and how far a run of `python -m gpu` reached them. Pure functions of its lines."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from windlass.evals.speed.rows import AXES

Line = dict[str, Any]
Found = Iterator[tuple[float, str]]  # a value, and where it was measured

STATIC = "transformers static, compiled"
DEEP, SHORT, LONG = 16384, 4096, 65536
BUDGET = 4096


@dataclass(frozen=True)
class Bar:
    """One demand: the worst of what was `found` must reach `least`, or stay within `most`."""

    what: str
    found: Callable[[Sequence[Line]], Found]
    least: float | None = None
    most: float | None = None

    @property
    def asked(self) -> str:
        """As a table says it."""
        return f">= {self.least:.2f}" if self.most is None else f"<= {self.most:.2f}"

    def cells(self, lines: Sequence[Line]) -> list[str]:
        """The bar, the worst value and its place, the number of places, and whether it is met."""
        found = sorted(self.found(lines))
        if not found:
            return [self.what, self.asked, "not measured", "-", "-"]
        if self.most is None:
            value, where = found[0]
            is_met = self.least is None or value >= self.least
        else:
            value, where = found[-1]
            is_met = value <= self.most
        return [self.what, self.asked, f"{value:.3f} ({where})", str(len(found)), "yes" if is_met else "no"]


def of_kind(lines: Sequence[Line], kind: str, group: str | None = None) -> list[Line]:
    """The lines of one kind, and one group of it."""
    return [line for line in lines if line["kind"] == kind and (group is None or line["group"] == group)]


def copy_rate(lines: Sequence[Line]) -> float | None:
    """10^9 bytes read plus written per second by a copy on the device (None: not measured)."""
    rates = [line["copy_gb_per_s"] for line in of_kind(lines, "machine")]
    return rates[-1] if rates else None


def against(lines: Sequence[Line], axis: str, base: str) -> Iterator[tuple[Line, Line]]:
    """Rows of `windlass bench`, each with the one that differs from it in having `base` on `axis`."""
    for line in lines:
        twins = [other for other in lines if other[axis] == base and row_of(other, axis) == row_of(line, axis)]
        if twins:
            yield line, twins[0]


def row_of(line: Line, *but: str) -> tuple[object, ...]:
    """The key of a row, some axes aside."""
    axes = ("way", "model", "test", *AXES)
    return tuple(line[axis] for axis in axes if axis not in but)


def _storage(lines: Sequence[Line]) -> Found:
    for line, base in against(of_kind(lines, "decode", "storage"), "storage", "rotated"):
        if line["storage"] == "unrotated":
            yield line["tokens_per_s"] / base["tokens_per_s"], f"{line['model']} {line['test']}"


def _attention(lines: Sequence[Line]) -> Found:
    rate = copy_rate(lines)
    for line in of_kind(lines, "attention"):
        if rate and line["what"] == "unrotated" and line["slots"] >= DEEP:
            yield line["gb_per_s"] / rate, f"{line['shape']} b{line['batch']}, {line['slots']:,} slots"


def _whole(lines: Sequence[Line]) -> Found:
    """The fastest way at each depth."""
    rate, best = copy_rate(lines), dict[str, float]()
    for line in of_kind(lines, "decode", "storage"):
        if rate and (line["model"], line["batch"], line["storage"]) == ("8b", 1, "unrotated"):
            best[line["test"]] = max(best.get(line["test"], 0.0), line["gb_per_s"] / rate)
    for test, value in best.items():
        yield value, test


def _peers(depth: int, ours: str) -> Callable[[Sequence[Line]], Found]:
    """The fastest of ours whose name begins so, at one depth."""

    def found(lines: Sequence[Line]) -> Found:
        rows = [line for line in of_kind(lines, "peers") if line["depth"] == depth]
        for place in sorted({(line["shape"], line["batch"]) for line in rows}):
            here = {line["peer"]: line["tokens_per_s"] for line in rows if (line["shape"], line["batch"]) == place}
            own = [rate for peer, rate in here.items() if peer.startswith(ours)]
            if own and STATIC in here:
                yield max(own) / here[STATIC], f"{place[0]} b{place[1]}"

    return found


def _policies(lines: Sequence[Line]) -> Found:
    for line, base in against(of_kind(lines, "decode", "policies"), "policy", "Recent()"):
        if line is not base:
            where = f"{line['policy'].partition('(')[0]}, {line['model']} {line['test']}"
            yield base["tokens_per_s"] / line["tokens_per_s"], where


BARS = (
    Bar("tokens/s, un-rotated over rotated storage, every depth", _storage, least=0.97),
    Bar(f"attention alone, bytes read over copy rate, {DEEP:,} slots and beyond", _attention, least=0.80),
    Bar("whole decode of 8b at batch 1, bytes read over copy rate, every depth", _whole, least=0.85),
    Bar(
        f"tokens/s over transformers' compiled static cache, depth {SHORT:,}",
        _peers(SHORT, "windlass, budget all"),
        least=1.2,
    ),
    Bar(
        f"tokens/s over transformers' compiled static cache, depth {LONG:,}, ours with budget {BUDGET:,}",
        _peers(LONG, f"windlass, budget {BUDGET}"),
        least=2.0,
    ),
    Bar("time per token of a policy over that of Recent", _policies, most=1.05),
)
