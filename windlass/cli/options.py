"""The options of the command line, each declared once; they are named as in the library."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from windlass.cli import complete
from windlass.cli.stop import unescaped

PromptCache = Annotated[
    Path | None,
    Option("--prompt-cache", metavar="FILE", help="Go on from this file, made by `windlass cache`; it stays as it is."),
]
PromptCacheOut = Annotated[Path | None, Option("--prompt-cache", metavar="FILE", help="The file to write.")]
Conversation = Annotated[Path | None, Option("--load", metavar="FILE", help="Go on with what /save wrote there.")]
KeepsSystem = Annotated[
    bool, Option("--keep-system", help="Never evict the system text and the head of the chat template.")
]
HasHistory = Annotated[
    bool, Option("--history/--no-history", envvar="WINDLASS_HISTORY", help="Keep lines and unfinished conversations.")
]

MaxTokens = Annotated[int, Option("--max-tokens", "-n", envvar="WINDLASS_MAX_TOKENS", help="Most tokens to write.")]
Temperature = Annotated[
    float, Option("--temperature", envvar="WINDLASS_TEMPERATURE", help="0 takes the likeliest token.")
]
TopK = Annotated[int, Option("--top-k", help="Draw from the k likeliest tokens; 0: off.")]
TopP = Annotated[float, Option("--top-p", help="Draw from the likeliest tokens that sum to p; 1: off.")]
MinP = Annotated[
    float, Option("--min-p", help="Leave out tokens less likely than this share of the likeliest; 0: off.")
]
RepetitionPenalty = Annotated[float, Option("--repetition-penalty", help="Above 1 discourages repeats; 1: off.")]
Stop = Annotated[
    list[str] | None,
    Option("--stop", metavar="TEXT", callback=unescaped, help="End before this text (\\n: a line break); repeatable."),
]
Seed = Annotated[int, Option("--seed", min=0, max=2**63 - 1, help="Same seed, same text.")]

Dtype = Annotated[
    str,
    Option(
        "--dtype",
        envvar="WINDLASS_DTYPE",
        autocompletion=complete.names_of(complete.DTYPES),
        help="auto (as the weights are), float32, bfloat16 or float16.",
    ),
]
Weights = Annotated[
    str,
    Option(
        "--weights",
        metavar="NAME",
        envvar="WINDLASS_WEIGHTS",
        autocompletion=complete.names_of(complete.WEIGHTS),
        help="auto (as they are), or int8 or int4 for those of linear layers, on a CPU; needs windlass[weights].",
    ),
]
Device = Annotated[
    str,
    Option(
        "--device",
        metavar="NAME",
        envvar="WINDLASS_DEVICE",
        autocompletion=complete.names_of(complete.DEVICES),
        help="Where the model and its cache are: cpu, cuda, cuda:1, mps; auto: the first there is of cuda, mps, cpu.",
    ),
]
Threads = Annotated[
    int | None,
    Option("--threads", min=1, max=1024, envvar="WINDLASS_THREADS", help="CPU threads; by default one per core."),
]
TensorParallel = Annotated[
    bool,
    Option(
        "--tensor-parallel",
        help="All processes that torchrun started hold the model together, each its heads; see docs/parallel.md.",
    ),
]
Shape = Annotated[
    str | None,
    Option("--shape", metavar="NAME", help="Instead of a model: random weights like 1b, 8b, 7b-mha, qwen3-next, dsv3."),
]
Layers = Annotated[int | None, Option("--layers", min=1, max=1024, help="Layers of the shape; by default its own.")]
PromptTokens = Annotated[str, Option("--prompt-tokens", "-p", metavar="LIST", help="Tokens to read; 0: none.")]
DecodeTokens = Annotated[str, Option("--decode-tokens", "-n", metavar="LIST", help="Tokens to write; 0: none.")]
Depths = Annotated[
    str,
    Option("--depth", "-d", metavar="LIST", help="Tokens that came before; random keys and values stand for them."),
]
Batches = Annotated[
    str, Option("--batch", metavar="LIST", help="Texts that are read or written at once; t/s counts all of them.")
]
Budgets = Annotated[str, Option("--budget", "--max-kv-size", metavar="LIST", help="Most tokens that a layer keeps.")]
PolicySpecs = Annotated[str, Option("--policy", metavar="LIST", help="Which tokens to keep, as in `generate`.")]
PositionModes = Annotated[str, Option("--positions", metavar="LIST", help="Where they are read, as in `generate`.")]
StoreSpecs = Annotated[str, Option("--store", metavar="LIST", help="How they are held: plain, int8, int4.")]
Storages = Annotated[
    str,
    Option(
        "--storage",
        metavar="LIST",
        help="unrotated, or rotated: the same kernels on keys that are stored rotated.",
    ),
]
Graphs = Annotated[
    str | None,
    Option(
        "--graph",
        metavar="LIST",
        help="on: a step of writing is recorded once and run again, and chooses its tokens; off: as it comes. "
        "By default on where there are graphs, on a GPU.",
    ),
]
ThreadCounts = Annotated[str | None, Option("--threads", metavar="LIST", help="CPU threads; by default one per core.")]
Repetitions = Annotated[int, Option("--repetitions", "-r", min=1, max=10_000, help="Runs of each row that count.")]
Output = Annotated[
    Path | None, Option("--output", "-o", metavar="FILE", help="Add a line of JSON per row to this file.")
]

Samples = Annotated[int, Option("--samples", min=1, max=1_000_000, help="Texts for each combination.")]
Results = Annotated[
    list[Path],
    Argument(metavar="RESULTS...", help="Files that `windlass eval` wrote, of one model.", show_default=False),
]
Page = Annotated[
    Path, Option("--output", "-o", metavar="FILE", help="The page; figures go to a folder beside it, named after it.")
]


@dataclass(frozen=True)
class SamplingArguments:
    """How the next token is chosen, by the names of `Sampling`."""

    temperature: Temperature = 0.0
    top_k: TopK = 0
    top_p: TopP = 1.0
    min_p: MinP = 0.0
    repetition_penalty: RepetitionPenalty = 1.0
    seed: Seed = 0


@dataclass(frozen=True)
class ChatArguments:
    """What a chat goes on with, and whether anything of it is kept."""

    conversation: Conversation = None
    has_history: HasHistory = True
    keeps_system: KeepsSystem = False


@dataclass(frozen=True)
class LoadOptions:
    """How the model is loaded, and what runs it."""

    dtype: Dtype = "auto"
    device: Device = "auto"
    threads: Threads = None
    weights: Weights = "auto"


@dataclass(frozen=True)
class BenchCacheLists:
    """Lists of values of the cache's options, by their names."""

    budget: Budgets = "all"
    policy: PolicySpecs = "recent"
    positions: PositionModes = "original"
    store: StoreSpecs = "plain"
