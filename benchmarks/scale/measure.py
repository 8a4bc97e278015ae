"""The simulation against a server that runs, with the same arrivals.

    windlass serve finder-3m --rows 4 --budget 256 --threads 1 --dtype float32 --port 8001 &
    PYTHONPATH=benchmarks python -m scale.measure 8001 >> benchmarks/results/scale.jsonl

Its costs are measured before and after, by requests alone and side by side; between, requests come as a pattern says.
The simulation is given the mean of the costs, the same arrivals, and the lengths that the answers had. What it says of
times to a first token and to the end is compared with what clients saw.
"""

import argparse
import json
import os
import statistics
import threading
import time
from dataclasses import asdict
from typing import Any

import numpy as np
from serving import Answer, Server, percentiles, side_by_side

from scale.arrivals import Arrival, patterns
from scale.simulate import Costs, Memory, simulated

CHUNK = 512
LONG, SHORT = 2000, 60  # tokens, about, of prompts that tell what a chunk costs
WRITTEN = 96


def prompt_of(tokens: int, number: int) -> list[int]:
    """Token ids that no other prompt begins with."""
    random = np.random.default_rng(number)
    return [int(each) for each in random.integers(300, 2000, tokens)]


def calibrated(server: Server, rounds: int) -> Costs:
    """What a step and a chunk take on this server, as its clients see it; means, for a busy machine is part of it."""
    number = iter(range(10**6, 10**7))
    lone, four, short, long = [], [], [], []
    for _ in range(rounds):
        short.append(_asked(server, SHORT, 2, next(number)).first)
        long.append(_asked(server, LONG, 2, next(number)).first)
        lone += _asked(server, SHORT, WRITTEN, next(number)).gaps
        answers = _together(server, 4, next(number))
        four += [gap for answer in answers for gap in answer.gaps[len(answer.gaps) // 2 :]]
    step_1, step_4 = statistics.mean(lone), statistics.mean(four)
    row = max(0.0, (step_4 - step_1) / 3)
    chunks = -(-LONG // CHUNK)
    # A short prompt is one chunk, a long one several: two equations.
    first_short, first_long = statistics.mean(short), statistics.mean(long)
    token = max(0.0, (first_long - chunks * first_short) / (LONG - chunks * SHORT))
    return Costs(step_1 - row, row, max(0.0, first_short - token * SHORT), token)


def _asked(server: Server, tokens: int, written: int, number: int, answer: Answer | None = None) -> Answer:
    return server.asked(prompt_of(tokens, number), written, answer)  # type: ignore[arg-type]  # ids are a prompt, too


def _together(server: Server, count: int, number: int) -> list[Answer]:
    return side_by_side(server, [prompt_of(SHORT, number + each) for each in range(count)], WRITTEN)[0]  # type: ignore[misc]


def served(server: Server, arrivals: list[Arrival]) -> tuple[list[Answer], list[Arrival]]:
    """Ask as they come; the answers, and the arrivals with the lengths that they had; not those without text."""
    asked: list[tuple[Answer, Arrival]] = []

    def ask(number: int, arrival: Arrival) -> None:
        answer = _asked(server, arrival.prompt, arrival.written, number)
        if answer.pieces:
            asked.append((answer, Arrival(arrival.at, answer.prompt, answer.written)))

    start, threads = time.perf_counter(), []
    for number, arrival in enumerate(arrivals):
        time.sleep(max(0.0, start + arrival.at - time.perf_counter()))
        threads.append(threading.Thread(target=ask, args=(number, arrival)))
        threads[-1].start()
    for thread in threads:
        thread.join()
    asked.sort(key=lambda each: each[1].at)
    return [answer for answer, _ in asked], [arrival for _, arrival in asked]


def main() -> None:
    """Measure, and print a line of JSON per pattern."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("port", type=int)
    parser.add_argument("--model", default="finder-3m")
    parser.add_argument("--rows", type=int, default=4)
    parser.add_argument("--budget", type=int, default=256)
    parser.add_argument("--requests", type=int, default=60)
    parser.add_argument("--shrink", type=float, default=6.0, help="divides the trace's lengths")
    parser.add_argument("--load", type=float, default=0.7, help="of what the server could do, by its costs")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    from machine import machine

    server, known = Server(options.port, options.model), patterns()
    _together(server, 4, 1)
    for name, cv in (("azure_conv", 1.0), ("azure_conv", 4.0), ("azure_code", 4.0)):
        before = calibrated(server, options.rounds)
        drawn = known[name].draw(options.requests, 1.0, 0, options.shrink, cv)
        # A row's share of a step is what it has at full load.
        work = [
            before.chunk * -(-each.prompt // CHUNK) + before.token * each.prompt
            + each.written * (before.step / options.rows + before.row)
            for each in drawn
        ]  # fmt: skip
        rate = options.load / statistics.mean(work)
        arrivals = [Arrival(each.at / rate, each.prompt, each.written) for each in drawn]
        answers, asked = served(server, arrivals)
        after = calibrated(server, options.rounds)
        costs = Costs(
            *(statistics.mean(pair) for pair in zip(asdict(before).values(), asdict(after).values(), strict=True))
        )
        said = simulated(arrivals, costs, Memory(options.rows, options.budget), CHUNK, queue=10**6)
        line: dict[str, Any] = {"kind": "scale", "pattern": name, "cv": cv, "rate": rate, "requests": len(asked)}
        line |= {"shrink": options.shrink, "rows": options.rows, "budget": options.budget, "load": options.load}
        line |= {"costs": asdict(costs), "costs_before": asdict(before), "costs_after": asdict(after)}
        line |= {"first": percentiles([answer.first for answer in answers]), "first_said": percentiles(said.first)}
        line |= {"whole": percentiles([answer.pieces[-1] for answer in answers]), "whole_said": percentiles(said.whole)}
        print(json.dumps(line | machine(1) | {"busy": os.getloadavg()[0]}), flush=True)


if __name__ == "__main__":
    main()
