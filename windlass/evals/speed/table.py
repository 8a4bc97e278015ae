"""Output of a benchmark: llama-bench's Markdown table, ratios within the run, and JSON objects."""

import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from windlass.core import __version__
from windlass.core.parse import in_units
from windlass.evals.report.page import padded
from windlass.evals.speed.rows import AXES, BenchRow, BenchSetup
from windlass.kernels import cpu

NUMBERS = ("size", "params", "threads", "t/s", "±", "GB/s", "ratio", "rounds")  # columns that align at the right


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds")


@dataclass(frozen=True)
class Conditions:
    """Conditions that all rows of a run have in common."""

    model: str
    size_bytes: int
    parameters: int
    dtype: str
    chunk: int
    repetitions: int
    date: str = field(default_factory=_now)
    gpu: str | None = None  # its name, where one was used

    @property
    def backend(self) -> str:
        """The attention backend, as in the table."""
        if self.gpu is not None:
            return f"cuda ({'triton' if find_spec('triton') else 'reference'})"
        name = cpu.instruction_set()
        return f"cpu ({'reference' if name == 'none' else name})"

    @property
    def versions(self) -> dict[str, str]:
        """Versions of the libraries that decide about speed."""
        return {"windlass": __version__} | {name: version(name) for name in ("torch", "transformers")}


def table(rows: Sequence[BenchRow], conditions: Conditions) -> str:
    """The rows that were timed, as llama-bench shows them. A setting has a column where a row's is not the default."""
    shared = {
        "model": conditions.model,
        "size": in_units(conditions.size_bytes),
        "params": _in_millions(conditions.parameters),
        "backend": conditions.backend,
    }
    unusual = {"chunk": str(conditions.chunk)} if conditions.chunk != 512 else {}
    unusual |= {"dtype": conditions.dtype} if conditions.dtype != "bfloat16" else {}
    # Threads have a column of their own.
    usual = BenchSetup().texts
    shown = [axis for axis in AXES if axis != "threads" and any(row.setup.texts[axis] != usual[axis] for row in rows)]
    lines = []
    for row in rows:
        labels = row.setup.texts
        bandwidth = row.gb_per_s
        lines.append(
            shared
            | {"threads": conditions.gpu or labels["threads"]}
            | unusual
            | {axis: labels[axis] for axis in shown}
            | {"test": str(row.workload), "t/s": f"{row.tokens_per_s:.2f} ± {row.half_range:.2f}"}
            | {"GB/s": "-" if bandwidth is None else f"{bandwidth:.2f}"}
        )
    return padded(lines, NUMBERS)


def in_common(rows: Sequence[BenchRow], conditions: Conditions) -> str:
    """A line for all rows: the model, the machine, and settings that are not the default."""
    usual, first = BenchSetup().texts, rows[0].setup.texts
    same = [axis for axis in AXES if axis != "threads" and axis not in _varied(rows)]
    threads = "" if "threads" in _varied(rows) else f", {first['threads']} thread{'s' * (first['threads'] != '1')}"
    settings = [f"chunk {conditions.chunk}"] if conditions.chunk != 512 else []
    settings += [f"{axis} {first[axis]}" for axis in same if first[axis] != usual[axis]]
    return (
        f"{conditions.model}, {in_units(conditions.size_bytes)}, {_in_millions(conditions.parameters)} parameters, "
        f"{conditions.dtype}; {conditions.gpu or conditions.backend + threads}"
        + "".join(f"; {each}" for each in settings)
    )


def varied(rows: Sequence[BenchRow]) -> list[dict[str, str]]:
    """Per row the test, the settings in which rows differ, and the measured speeds."""
    axes = _varied(rows)
    return [
        {"test": str(row.workload)}
        | {axis: row.setup.texts[axis] for axis in axes}
        | {"t/s": f"{row.tokens_per_s:.2f}", "±": f"{row.half_range:.2f}"}
        | {"GB/s": "-" if row.gb_per_s is None else f"{row.gb_per_s:.2f}"}
        for row in rows
    ]


def _varied(rows: Sequence[BenchRow]) -> list[str]:
    return [axis for axis in AXES if len({row.setup.texts[axis] for row in rows}) > 1]


def footnote(rows: Sequence[BenchRow], conditions: Conditions) -> str:
    """The units of the table's numbers, and the place where they were measured."""
    counts = sorted({len(row.samples_s) for row in rows})
    runs = " or ".join(map(str, counts)) + (" run" if counts == [1] else " runs")
    versions = ", ".join(f"{name} {number}" for name, number in conditions.versions.items())
    return (
        f"t/s: median ± half the interquartile range of {runs}, rows in turn. GB/s: weights and held keys and values "
        f"read per second in tg.\n{cpu_name()}; {versions}; {conditions.date}"
    )


def ratios(rows: Sequence[BenchRow]) -> list[str]:
    """A table for each list of several settings: speeds against its first value, all else being equal."""
    varied = [axis for axis in AXES if any(row.places[axis] for row in rows)]
    tables = []
    for axis in varied:
        lines = []
        for row in rows:
            base = _base_of(row, axis, rows)
            if base is None:
                continue
            labels = row.setup.texts
            paired = [speed / base_speed for speed, base_speed in zip(row.speeds, base.speeds, strict=False)]
            lines.append(
                {other: labels[other] for other in varied if other != axis}
                | {"test": str(row.workload), axis: labels[axis], "against": base.setup.texts[axis]}
                | {"ratio": f"{row.tokens_per_s / base.tokens_per_s:.3f}"}
                | {"rounds": f"{min(paired):.3f} to {max(paired):.3f}"}
            )
        if lines:
            tables.append(padded(lines, NUMBERS))
    return tables


def as_json(row: BenchRow, conditions: Conditions) -> dict[str, object]:
    """All facts about a row, for a JSON object."""
    work = row.workload
    return {
        "model": conditions.model,
        "size_bytes": conditions.size_bytes,
        "parameters": conditions.parameters,
        "backend": conditions.backend,
        "dtype": conditions.dtype,
        **row.setup.labels(),
        "test": str(work),
        "prompt_tokens": work.tokens if work.is_prompt else 0,
        "decode_tokens": 0 if work.is_prompt else work.tokens,
        "depth": work.depth,
        "batch": work.batch,
        "repetitions": conditions.repetitions,
        "samples_s": row.samples_s,
        "tokens_per_s": row.tokens_per_s,
        "half_interquartile_range_per_s": row.half_range,
        "bytes_per_token": row.bytes_per_token,
        "gb_per_s": row.gb_per_s,
        "versions": conditions.versions,
        "cpu": cpu_name(),
        "gpu": conditions.gpu,
        "date": conditions.date,
    }


def cpu_name() -> str:
    """The processor's name, from the system."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _base_of(row: BenchRow, axis: str, rows: Sequence[BenchRow]) -> BenchRow | None:
    """The timed row that differs from `row` in having the first value of `axis`. None where that is `row`."""
    if row.places[axis] == 0:
        return None
    wanted = row.places | {axis: 0}
    return next((each for each in rows if each.places == wanted), None)


def _in_millions(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e9 else f"{count / 1e6:.2f} M"
