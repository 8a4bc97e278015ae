"""How many requests a second a server takes, by simulation: fixed rows beside pages in the same memory.

    PYTHONPATH=benchmarks python -m scale.capacity > benchmarks/results/capacity.jsonl

The costs are those that one client saw of the measured server; see `costs_of_server`.
"""

import json
import statistics
from dataclasses import asdict
from typing import Any

from scale.arrivals import Pattern, lines, patterns
from scale.simulate import Costs, Memory, Told, simulated

PATIENCE_S, PART = 30.0, 0.95  # within which this part of first tokens must come
REQUESTS, SEEDS = 200, 2
LOWEST, HIGHEST, HALVINGS = 0.0005, 2.0, 8  # requests a second
ROWS, BUDGET, PAGED_ROWS = 16, 1024, 64
LAYERS, MEASURED_LAYERS = 4, 16  # of the server, and of the model on which reading a held token was measured
WORKLOADS = (  # name, trace, times its lengths, how the time between requests varies
    ("conversations", "azure_conv", 1.0, 1.0),
    ("conversations in bursts", "azure_conv", 1.0, 2.0),
    ("code in bursts", "azure_code", 1.0, 2.0),
    ("conversations four times as long", "azure_conv", 4.0, 1.0),
)


def costs_of_server() -> Costs:
    """Of the server that was measured, by what a single client saw; of held tokens, by the speed of the model alone."""
    [line] = [line for line in lines("serving.jsonl") if line["server"] == "windlass"]
    alone, read = line["clients_1"], line["reuse"]
    token = read["miss_first"] / read["prompt_tokens"]
    chunk = max(0.0, alone["first"]["p50"] - token * alone["prompt_tokens"])
    samples = [each for each in lines("peers.jsonl") if each["kind"] == "sample" and each["peer"] == "windlass"]
    step = {
        depth: statistics.median(
            each["seconds"] / each["tokens"]
            for each in samples
            if each["test"] == "tg" and each["tokens"] == 3 and each["depth"] == depth
        )
        for depth in (0, 16384)
    }
    held = max(0.0, step[16384] - step[0]) / 16384 * LAYERS / MEASURED_LAYERS
    return Costs(alone["gap"]["p50"], 0.0, chunk, token, held)


def tried(pattern: Pattern, times: float, cv: float, costs: Costs, memory: Memory, rate: float) -> list[Told]:
    """Runs at this rate, of other arrivals each."""
    return [
        simulated(pattern.draw(REQUESTS, rate, seed, 1 / times, cv), costs, memory, queue=10**6)
        for seed in range(SEEDS)
    ]


def highest(pattern: Pattern, times: float, cv: float, costs: Costs, memory: Memory) -> float:
    """The rate at which first tokens just come in time, to 3 %."""
    low, high = LOWEST, HIGHEST
    for _ in range(HALVINGS):
        middle = (low * high) ** 0.5
        first = sorted(each for told in tried(pattern, times, cv, costs, memory, middle) for each in told.first)
        is_in_time = bool(first) and first[int(PART * len(first))] <= PATIENCE_S
        low, high = (middle, high) if is_in_time else (low, middle)
    return low


def main() -> None:
    """Print a line of JSON for each kind of texts and of memory."""
    costs, known = costs_of_server(), patterns()
    for name, trace, times, cv in WORKLOADS:
        for memory in (Memory(ROWS, BUDGET), Memory(PAGED_ROWS, None, ROWS * BUDGET)):
            rate = highest(known[trace], times, cv, costs, memory)
            told = tried(known[trace], times, cv, costs, memory, rate)
            count = REQUESTS * SEEDS
            line: dict[str, Any] = {"kind": "capacity", "name": name, "trace": trace, "times": times, "cv": cv}
            line |= {"costs": asdict(costs), "memory": asdict(memory), "rate": rate, "requests": count}
            line |= {"tokens_per_s": statistics.fmean(each.tokens_per_s for each in told)}
            line |= {"most_rows": max(each.most_rows for each in told)}
            line |= {"sent_back": sum(each.sent_back for each in told) / count}
            line |= {"refused": sum(each.refused for each in told) / count}
            print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
