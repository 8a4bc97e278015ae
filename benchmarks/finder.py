"""Lines of `windlass eval` as lines of `benchmarks/results/finder.jsonl`: a mean with its interval for each setting.

    python benchmarks/finder.py EVAL.jsonl ... > benchmarks/results/finder.jsonl

A text is one sample, whether it is asked one question or several.
"""

import argparse
import json
import re
from pathlib import Path
from statistics import fmean

from windlass.evals.report.summaries import wilson

SETTING = ("length", "policy", "asked_budget", "shares", "recalled", "merge", "positions")
NONE = {"shares": "none", "recalled": "none", "merge": "none", "positions": "original"}


def settings_of(file: Path) -> dict[tuple[object, ...], dict[int, list[float]]]:
    """The scores of each text, by task and setting."""
    found: dict[tuple[object, ...], dict[int, list[float]]] = {}
    for text in file.read_text().splitlines():
        line = json.loads(text)
        if line["kind"] == "case":
            task = re.sub(r"\(.*\)|^.*:", "", line["task"])
            key = (task, *(line.get(name, NONE.get(name)) for name in SETTING))
            found.setdefault(key, {}).setdefault(line["sample"], []).append(line["score"])
    return found


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    cells = [(file.stem, *cell) for file in parser.parse_args().files for cell in settings_of(file).items()]
    for run, key, texts in cells:
        score = fmean(fmean(scores) for scores in texts.values())
        line = {"model": "finder-3m", "run": run, **dict(zip(("task", *SETTING), key, strict=True))}
        line["budget"] = line.pop("asked_budget")
        line |= {"samples": len(texts), "score": round(score, 4), "interval": wilson(score, len(texts))}
        print(json.dumps(line))
