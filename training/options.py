"""What is typed on the command line of the training, and what it says about every step."""

import argparse
from dataclasses import dataclass
from pathlib import Path

from windlass.core.errors import UsageError

MIX = (
    "among=14,magic=12,ruler_among=12,ruler=10,vt=14,vt_example=6,again=5,pairs=4,words=6,word_values=3,passkey=3,"
    "passkey_noise=2,magic_noise=3,several=2,novel=5,uuids=2,fwe=2,cwe=1"
)

PRECISIONS = ("bfloat16", "float32")

LEAST = {
    "positions": 1,
    "batch_tokens": 1,
    "warm_up": 0,
    "decay": 0,
    "muon_rate": 0,
    "adam_rate": 0,
    "minutes": 0,
    "save_minutes": 0,
    "check_steps": 1,
    "workers": 0,
}


@dataclass(frozen=True)
class Options:
    """What was typed; of `start` and `config` one is None, and of `contexts` and `stages`."""

    books: Path
    folder: Path
    start: Path | None
    config: Path | None
    tokenizer: Path | None
    positions: int | None
    contexts: str | None
    stages: Path | None
    batch_tokens: int
    warm_up: int
    decay: int
    muon_rate: float
    adam_rate: float
    mix: str | None
    seed: int
    minutes: float
    save_minutes: float
    check_steps: int
    device: str
    attention: str
    precision: str
    workers: int


def options_of(arguments: list[str] | None, description: str) -> Options:
    """Of these arguments, by default those of the process; ends it where they are unknown or help is asked for.

    Raises: UsageError for numbers that are too small.
    """
    parser = argparse.ArgumentParser(
        "python -m training", description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("books", type=Path, help="novels, as text or packed by xz")
    parser.add_argument("folder", type=Path, help="where the model goes, and checkpoints on the way")
    start = parser.add_mutually_exclusive_group(required=True)
    start.add_argument("--from", dest="start", type=Path, metavar="FOLDER", help="go on from these weights")
    start.add_argument("--config", type=Path, help="begin with random weights: a config.json, or its folder")
    parser.add_argument("--tokenizer", type=Path, metavar="FOLDER", help="of a model with --config; else a new one")
    parser.add_argument("--positions", type=int, help="longest context the model is said to be for; else as it was")
    course = parser.add_mutually_exclusive_group(required=True)
    course.add_argument("--contexts", help="tokens:steps,... in this order, as 128:2000,256:1000")
    course.add_argument("--stages", type=Path, metavar="FILE", help="JSON list of stages, each with contexts and a mix")
    parser.add_argument("--batch-tokens", type=int, default=12288, help="of a step")
    parser.add_argument("--warm-up", type=int, default=100, help="first steps, with less than the full rate")
    parser.add_argument("--decay", type=int, default=500, help="last steps, with less and less of it")
    parser.add_argument("--muon-rate", type=float, default=0.02, help="of matrices")
    parser.add_argument("--adam-rate", type=float, default=4e-3, help="of everything else")
    parser.add_argument("--mix", help=f"lessons, and how often each is drawn; {MIX} if not given")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="stop then; the same command goes on")
    parser.add_argument("--save-minutes", type=float, default=5.0, help="between checkpoints")
    parser.add_argument("--check-steps", type=int, default=250, help="between checks of every lesson")
    parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument("--attention", default="sdpa", help="of transformers; eager is the fastest on some CPUs")
    parser.add_argument(
        "--precision",
        choices=PRECISIONS,
        default="bfloat16",
        help="of products; float32 is the faster one on CPUs without instructions for bfloat16",
    )
    parser.add_argument("--workers", type=int, default=0, help="processes that make texts")
    typed = vars(parser.parse_args(arguments))
    for name, least in LEAST.items():
        if typed[name] is not None and not typed[name] >= least:
            raise UsageError(f"--{name.replace('_', '-')} {typed[name]} is too small; the least is {least}")
    options = Options(**typed)
    if options.mix is not None and options.stages is not None:
        raise UsageError("--mix is of no use with --stages, whose stages have mixes of their own; leave it out")
    if options.tokenizer is not None and options.config is None:
        raise UsageError("--tokenizer goes with --config; weights of --from have their own, leave it out")
    return options
