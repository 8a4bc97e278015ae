"""The tables of `docs/scale.md`, out of files of results: PYTHONPATH=benchmarks python -m scale.tables

What one client sees of the measured server (`serving.jsonl`) gives the costs; what it does for more clients is said by
the simulation, and compared with what was measured. Then the simulation is asked what was not (`capacity.jsonl`).
"""

from pathlib import Path

from scale.arrivals import Arrival, lines
from scale.capacity import BUDGET, ROWS, costs_of_server
from scale.simulate import Memory, simulated
from windlass.core.parse import in_units
from windlass.evals.report.page import table

PAGE = Path(__file__).parents[2] / "docs" / "scale.md"
SHAPES = {"1b": (16, 8, 64, 2.2e9), "8b": (32, 8, 128, 16.1e9)}  # layers, kv heads, width of a head, bytes of weights
BUDGETS = (256, 1024, 4096)
MACHINES = {"24 GiB": 24 * 2**30, "80 GB": 80 * 10**9}
SPARE = 0.1  # of a machine's memory, for all else
LONG = 32_768  # tokens of a long text
THINK_S = 60.0  # from one request of a user to the next
HIDDEN = {"1b": 2048, "8b": 4096}


def of_token(shape: str) -> int:
    """Bytes of a token's keys and values in bfloat16, and of its positions."""
    layers, kv_heads, width, _ = SHAPES[shape]
    return layers * kv_heads * (2 * width * 2 + 4)


def memory() -> str:
    """How many texts fit."""
    rows = []
    mean = round(sum(lines("arrivals.jsonl")[0][name] for name in ("mean_prompt", "mean_written")))
    for shape, (_, _, _, weights) in SHAPES.items():
        for name, size in MACHINES.items():
            free = size * (1 - SPARE) - weights
            held = [of_token(shape) * tokens for tokens in (*BUDGETS, mean, LONG)]
            cells = [f"{free / each:,.0f}" if free > each else "none" for each in held]
            rows.append([shape, name, in_units(of_token(shape)), *cells])
    heads = ["model", "machine", "a token", *(f"budget {each:,}" for each in BUDGETS)]
    return table([*heads, f"whole texts of {mean:,}", f"whole texts of {LONG:,}"], rows)


def checked() -> str:
    """What the simulation says of several clients, beside what they saw."""
    costs, rows = costs_of_server(), []
    [line] = [line for line in lines("serving.jsonl") if line["server"] == "windlass"]
    for clients in (4, 16):
        seen = line[f"clients_{clients}"]
        arrivals = [Arrival(0.0, seen["prompt_tokens"], seen["written"] // clients)] * clients
        said = simulated(arrivals, costs, Memory(ROWS, BUDGET))
        for name, measured, simulation in (
            ("tokens a second", seen["tokens_per_s"], said.tokens_per_s),
            ("first token, median, s", seen["first"]["p50"], said.quantile(0.5)),
            ("first token, 95 %, s", seen["first"]["p95"], said.quantile(0.95)),
        ):
            rows.append([f"{clients} clients at once", name, *_compared(measured, simulation)])
    for each in lines("scale.jsonl"):
        what = f"{each['requests']} requests of `{each['pattern']}`, cv {each['cv']:g}, {each['rate']:.2g} a second"
        for key, name in (("first", "first token"), ("whole", "whole answer")):
            for part, told in (("p50", "median"), ("p95", "95 %")):
                measured, simulation = each[key][part], each[f"{key}_said"][part]
                rows.append([what, f"{name}, {told}, s", *_compared(measured, simulation)])
    return table(["what came", "figure", "measured", "simulated", "error"], rows)


def _compared(measured: float, said: float) -> list[str]:
    return [f"{measured:.2f}", f"{said:.2f}", f"{100 * (said / measured - 1):+.0f} %"]


def users() -> str:
    """How many requests a second the measured server takes, and so how many users; with fixed rows, and with pages."""
    rows = []
    for each in lines("capacity.jsonl"):
        memory = each["memory"]
        kind = (
            f"{memory['rows']} rows of {memory['budget']:,}" if memory["budget"] else f"pages for {memory['tokens']:,}"
        )
        rows.append([
            each["name"], kind, f"{each['rate']:.3f}", f"{each['rate'] * THINK_S:.1f}", f"{each['tokens_per_s']:.1f}",
            str(each["most_rows"]), f"{100 * each['sent_back']:.0f} %", f"{100 * each['refused']:.0f} %",
        ])  # fmt: skip
    heads = ["texts", "memory", "requests a second", "users", "tokens a second", "most at once", "sent back", "refused"]
    return table(heads, rows)


def wire() -> str:
    """Bytes that go between machines."""
    rows = []
    for shape, (layers, *_) in SHAPES.items():
        rows.append([
            shape, "0 B", in_units(2 * layers * HIDDEN[shape] * 2), in_units(of_token(shape) * BUDGET),
            in_units(of_token(shape) * LONG),
        ])  # fmt: skip
    heads = ["model", "cache, per token", "activations to be summed, per token", f"a session, budget {BUDGET:,}"]
    return table([*heads, f"a session of {LONG:,}, whole"], rows)


TABLES = {"memory": memory, "checked": checked, "users": users, "wire": wire}


def written(page: str) -> str:
    """The page with its tables made anew, each between its marks."""
    for name, make in TABLES.items():
        before, _, rest = page.partition(f"<!-- {name} -->\n")
        _, _, after = rest.partition(f"<!-- end of {name} -->")
        page = f"{before}<!-- {name} -->\n{make()}\n<!-- end of {name} -->{after}"
    return page


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))
