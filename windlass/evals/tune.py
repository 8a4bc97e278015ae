"""`windlass tune`: which policy, store and positions serve a model and a text best in so many bytes."""

import hashlib
import itertools
import math
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

import torch
from transformers import PreTrainedModel

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.core.files import read_text
from windlass.core.parse import MAX_NUMBER, in_units, parse_list
from windlass.core.step import HEADROOM
from windlass.engine import generate
from windlass.engine.text import encode
from windlass.evals.grid import CasePlan, Grid, Settings, axes_of, load_task, planned
from windlass.evals.report.summaries import (
    SURE,
    Texts,
    compared,
    listed,
    percent,
    sign_test,
    text_of,
    texts_counted,
    wilson,
)
from windlass.evals.results import Case, Header, open_results
from windlass.evals.run import CHUNK, FULL_TOKENS, EvalSession, Executor, InProcess, Runner, header_of
from windlass.evals.task import ALL, Budget, Task
from windlass.hf.forward import forward
from windlass.hf.kv_cache import KVCache, LayerShape, layer_shapes
from windlass.hf.load import load
from windlass.hf.model_facts import shown_name, trained_length
from windlass.policies import Recent
from windlass.policies.registry import spelled
from windlass.positions.modes import Compact, Original, PositionMode, SelfExtend

NUMBER_BYTES = 4  # of a position, and of a number that a policy or a rule of merging keeps, per slot
PROBES = (48, 80)  # budgets, too small to take time
ASKED = 8  # tokens of a question after it
STEPS = HEADROOM + 8  # of decode in a probe: more than records are kept of


@dataclass(frozen=True)
class LayerCost:
    """What the slots of a layer take: `fixed` bytes, and `per_slot` for each; at most `most_tokens` are held."""

    fixed: int
    per_slot: int
    most_tokens: int | None

    def of(self, budget: int, rollback: int) -> int:
        """Bytes with this budget: room for the next tokens and for those that may come back included."""
        tokens = budget if self.most_tokens is None else min(budget, self.most_tokens)
        return self.fixed + self.per_slot * (tokens + HEADROOM + rollback)


@dataclass(frozen=True)
class Records:
    """Bytes of what a cache keeps beside its slots: statistics of layers, and records of the latest steps."""

    fixed: float = 0.0
    per_token: float = 0.0

    def of(self, budget: int) -> float:
        """With this budget."""
        return self.fixed + self.per_token * budget


def layer_bytes(shape: LayerShape, options: CacheOptions) -> LayerCost:
    """What one layer of one text takes, by store, policy and merge rule.

    Raises: UsageError where the store cannot hold such keys or values.
    """
    _, keys, values = shape.states(torch.device("cpu"))
    sizes = []
    for slots in (1, 2):
        store = shape.empty_store(options.store)
        store.allocate(keys, values, slots, options.rollback)
        sizes.append(sum(tensor.nbytes for tensor in store.tensors().values()))
    needs = options.policy.needs
    numbers = 1 + len({*needs.state, *(options.merge.state if options.merge is not None else ())})
    heads = shape.kv_heads if needs.per_head else 1
    one, two = sizes
    return LayerCost(2 * one - two, two - one + NUMBER_BYTES * heads * numbers, shape.most_visible)


def bytes_of(layers: Sequence[LayerCost], options: CacheOptions, budget: int, records: Records = Records()) -> float:
    """What a cache of one text takes at rest, once it holds `budget` tokens a layer."""
    return sum(layer.of(budget, options.rollback) for layer in layers) + records.of(budget)


def records_of(
    model: PreTrainedModel, ids: Sequence[int], options: CacheOptions, layers: Sequence[LayerCost]
) -> Records:
    """Measured on two small caches that read `ids` over and over: what it takes grows with the budget, if at all."""
    low, high = ((budget, _most_held(model, ids, replace(options, budget=budget))) for budget in PROBES)
    beside = [max(0.0, held - bytes_of(layers, options, budget)) for budget, held in (low, high)]
    per_token = max(0.0, (beside[1] - beside[0]) / (PROBES[1] - PROBES[0]))
    return Records(max(0.0, beside[1] - per_token * PROBES[1]), per_token)


@torch.no_grad()
def _most_held(model: PreTrainedModel, ids: Sequence[int], options: CacheOptions) -> int:
    """The most bytes that a cache held after any step of decode."""
    assert options.budget is not None, "a probe without budget"
    cache = KVCache.from_options(model, options)
    tokens = options.budget + options.chunk
    generate.prefill(model, cache, [(list(ids) * (1 + tokens // len(ids)))[:tokens]])
    generate.prefill(model, cache, [list(ids[:ASKED])])
    most = cache.bytes_held
    for token in (list(ids) * STEPS)[:STEPS]:
        forward(model, torch.tensor([[token]], device=model.device), None, cache, [0])
        most = max(most, cache.bytes_held)
    return most


def budget_within(layers: Sequence[LayerCost], options: CacheOptions, size: int, records: Records = Records()) -> int:
    """The largest budget with which `bytes_of` is at most `size`.

    Raises: UsageError where even the smallest cache is larger.
    """
    least = options.limits.sinks + (options.window or 1) + 1
    smallest = bytes_of(layers, options, least, records)
    if smallest > size:
        raise UsageError(
            f"--bytes {in_units(size)} are too few for policy {options.policy!r} in store {options.store.name}: "
            f"{least} tokens a layer, the fewest, take {in_units(round(smallest))}; raise --bytes"
        )
    low, high = least, MAX_NUMBER
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if bytes_of(layers, options, middle, records) <= size else (low, middle - 1)
    return low


DEFAULT_LENGTH = 2048  # tokens of a sample, or twice the smallest budget
SHARE = 0.9  # of the user's text in a sample, at most: samples begin at different sentences
LEAST = 256  # tokens of a text to try anything on
MOST_GROUP = 16  # by which distances are divided
NEAR = 64  # tokens that self_extend reads at their own distance


@dataclass(frozen=True)
class Candidates:
    """What is tried, at texts of `length` tokens; `left_out` tells what could not be, and why.

    `is_whole`: every candidate holds the whole text, so there is nothing to choose.
    """

    settings: tuple[Settings, ...]
    length: int
    left_out: tuple[str, ...]

    @property
    def is_whole(self) -> bool:
        """Whether nothing is evicted under any of them."""
        return all((each.budget.slots or 0) >= self.length for each in self.settings)


def tasks_on(file: Path, tasks: str) -> dict[str, Task]:
    """The tasks that were asked for, by label; those that read a text read that of `file`.

    The label names the file without its folder and its contents, so that another text is another task.

    Raises: UsageError when the file or a task cannot be read.
    """
    text = read_text(file, f"text file {file}")
    mark = hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:8]
    found: dict[str, Task] = {}
    for label, task in parse_list("--tasks", tasks, load_task):
        reading = task.reading(file)
        found[label if reading is None else f"{label}({file.name} {mark})"] = task if reading is None else reading
    return found


def candidates_of(
    model: PreTrainedModel,
    shapes: Sequence[LayerShape],
    ids: Sequence[int],
    lists: Mapping[str, str],
    size: int,
    length: int | None,
    trained: int | None,
) -> Candidates:
    """Every combination of the `lists`, in at most `size` bytes. `ids` are those of the user's text.

    A combination that cannot be made for this model, or not in so few bytes, is left out. Where the text fits
    whole, one policy stands for all. Without a list of positions they are read as they are within the `trained`
    length, and beyond it as `placed` says.

    Raises: WindlassError for a list that cannot be read, a text that is too short, or when nothing is left.
    """
    _check_length(len(ids), length)
    axes = {"positions": [Original()], **axes_of({name: typed for name, typed in lists.items() if typed})}
    made: list[tuple[CacheOptions, int]] = []
    left_out = []
    for values in itertools.product(*axes.values()):
        options = CacheOptions(chunk=CHUNK, **dict(zip(axes, values, strict=True)))
        try:
            layers = [layer_bytes(shape, options) for shape in shapes]
            budget_within(layers, options, size)  # what is far too large is not probed
            records = records_of(model, ids, options, layers)
            made.append((options, budget_within(layers, options, size, records)))
        except UsageError as error:
            left_out.append(str(error))
    if not made:
        raise UsageError(left_out[0])
    wanted = _length(len(ids), length, min(budget for _, budget in made))
    settings: dict[tuple[str, ...], Settings] = {}
    for options, budget in made:
        if not lists.get("positions"):
            budget, mode = placed(len(ids), budget, trained)
            options = replace(options, positions=mode)
        each = Settings(Budget(str(budget), budget), options)
        labels = each.labels | ({"policy": "any"} if budget >= wanted else {}) | {"asked_budget": "any"}
        settings.setdefault(tuple(labels.values()), each)
    return Candidates(tuple(settings.values()), wanted, tuple(left_out))


def placed(tokens: int, budget: int, trained: int | None) -> tuple[int, PositionMode]:
    """The budget and the positions with which a model reads a text of `tokens` of which `budget` could be kept.

    Within the trained length they stay as they are. Past it, kept tokens are counted anew where they fit in what the
    model was trained on beside a chunk, or in half of it. Where they do not, distances are divided by as much as the
    text needs; where that is more than `MOST_GROUP`, fewer are kept, so that they fit.
    """
    if trained is None or tokens <= trained:
        return budget, Original()
    fitting = max(trained - CHUNK, trained // 2)
    group = -(-tokens // max(1, trained - NEAR))
    if budget > fitting and group <= MOST_GROUP:
        return budget, SelfExtend(group, NEAR)
    return min(budget, fitting), Compact()


def _length(tokens: int, asked: int | None, smallest: int) -> int:
    """Tokens of a sample: what was asked for, or twice the smallest budget, as far as the text goes."""
    return asked or min(max(DEFAULT_LENGTH, 2 * smallest), int(SHARE * tokens))


def _check_length(tokens: int, asked: int | None) -> None:
    if asked is not None and asked > tokens:
        raise UsageError(
            f"--length {asked} is more than the {tokens:,} tokens of the text; lower it, or give a longer one"
        )
    if tokens < LEAST:
        raise UsageError(f"the text has {tokens} tokens of this model's; give one of {LEAST} or more")


@dataclass(frozen=True)
class CandidateResult:
    """How one candidate did: per text what it found of what was hidden there (0 to 1), and the nll of what it read.

    `kl` is the mean divergence from a full cache, where one was read beside; `bytes_held` the most of any case.
    """

    settings: Settings
    found: Texts
    losses: Texts
    kl: float | None
    bytes_held: int

    @property
    def samples(self) -> int:
        """Texts that it was tried on."""
        return max(len({text[2:] for text in texts}) for texts in (self.found, self.losses))

    @property
    def share_found(self) -> float | None:
        """The mean of what was found; None where nothing was hidden."""
        return fmean(self.found.values()) if self.found else None

    @property
    def nll(self) -> float | None:
        """The mean, in nats per token; None where no text was predicted."""
        return fmean(self.losses.values()) if self.losses else None

    @property
    def order(self) -> tuple[float, float, float]:
        """What was tried on most texts comes first, then who found most, then who predicts best."""
        nll = self.nll
        is_known = nll is not None and math.isfinite(nll)
        return -float(self.samples), -(self.share_found or 0.0), nll if nll is not None and is_known else math.inf

    @property
    def policy(self) -> str:
        """As the command line spells it."""
        return spelled(self.settings.labels["policy"])

    @property
    def name(self) -> str:
        """As in a sentence: `"key_diff in int8"`."""
        labels = self.settings.labels
        unusual = [labels["positions"]] if labels["positions"] != "original" else []
        unusual += [labels["merge"]] if labels["merge"] != "none" else []
        return ", ".join([f"{self.policy} in {labels['store']}", *unusual])


def ranked(settings: Sequence[Settings], cases: Sequence[Case], samples: int | None = None) -> list[CandidateResult]:
    """Those of `settings` that have cases, the best first; only the first `samples` texts of each count."""
    found = []
    for each in settings:
        own = [
            case
            for case in cases
            if all(getattr(case, name) == label for name, label in each.labels.items())
            and (samples is None or case.sample < samples)
        ]
        if own:
            scores = {text: fmean(values) for text, values in _by_text(own, "score").items()}
            losses = {text: fmean(values) for text, values in _by_text(own, "nll").items()}
            kls = [case.kl for case in own if case.kl is not None]
            most = max(case.bytes_held for case in own)
            found.append(CandidateResult(each, scores, losses, fmean(kls) if kls else None, most))
    return sorted(found, key=lambda each: each.order)


def sentence(results: Sequence[CandidateResult], full: CandidateResult | None, size: int) -> str:
    """The verdict on `results`, the best first, none of which takes more than `size` bytes; `full` evicts nothing."""
    best, *others = results
    finalists = [each for each in others if each.samples == best.samples]
    close = [each.name for each in finalists if not is_surely_better(best, each)]
    texts = texts_counted(best.samples)
    told = f"Of {len(results)} candidates within {in_units(size)}, {best.name} did best"
    told += f", with {best.settings.budget.slots:,} tokens a layer: "
    if not others:
        told = f"{best.name} was the only candidate within {in_units(size)}: "
    told += (" with " if best.share_found else " and was taken for ").join(
        [*_recall(best, texts), *_perplexity(best, full)]
    )
    if finalists and len(close) == len(finalists):
        told += f"; none is significantly better than another: {texts} do not tell {listed(close)} from it"
    elif close:
        told += f"; {texts} do not tell {listed(close)} from it"
    elif finalists:
        told += f"; on {texts} that is surely better than {listed([each.name for each in finalists])}"
        if best.share_found and all(each.share_found == best.share_found for each in finalists):
            told += ", by perplexity alone, for they found as much"
    return told + "."


def is_surely_better(one: CandidateResult, other: CandidateResult) -> bool:
    """Whether a sign test tells that `one` finds more, or that it predicts better where both find the same."""
    wins, losses = compared(one.found, other.found)
    if wins != losses:
        return wins > losses and sign_test(wins, losses) < SURE
    higher, lower = compared(one.losses, other.losses)
    return lower > higher and sign_test(lower, higher) < SURE


def command(model: str, text: str, best: CandidateResult, loading: Sequence[str]) -> str:
    """The line that reads a text in the cache that did best; `loading` are the options of the model, as typed."""
    labels, options = best.settings.labels, best.settings.options
    words = ["windlass", "generate", model, "--budget", labels["asked_budget"], "--policy", best.policy]
    words += ["--store", labels["store"], "--positions", labels["positions"]]
    words += ["--merge", labels["merge"]] if options.merge is not None else []
    return shlex.join([*words, "--chunk", str(options.chunk), *loading, "--file", text])


def _recall(best: CandidateResult, texts: str) -> list[str]:
    if best.share_found is None:
        return []
    if best.share_found == 0:
        return [f"it found nothing of what was hidden in {texts}, as all others,"]
    low, high = wilson(best.share_found, len(best.found))
    interval = f"95 % interval {100 * low:.0f} to {percent(high)}"
    return [f"it found {percent(best.share_found)} of what was hidden in {texts} ({interval})"]


def _perplexity(best: CandidateResult, full: CandidateResult | None) -> list[str]:
    if best.nll is None:
        return []
    told = f"a perplexity of {math.exp(min(best.nll, 700.0)):.4g}"
    if full is not None and full.nll is not None:
        change = 100 * math.expm1(min(best.nll - full.nll, 20.0))
        told += f", {abs(change):.1f} % {'below' if change < 0 else 'above'} the full cache's"
    return [told]


def _by_text(cases: Sequence[Case], measure: str) -> dict[tuple[object, ...], list[float]]:
    found: dict[tuple[object, ...], list[float]] = {}
    for case in cases:
        value: float | None = getattr(case, measure)
        if value is not None:
            found.setdefault((case.task, case.length, *text_of(case)), []).append(value)
    return found


LEAST_LEFT = 2  # candidates in the last round, so that there is something to compare
SHARES = (4, 2, 1)  # of the samples, after which half of the candidates leave


@dataclass(frozen=True)
class TuneOptions:
    """What the user asked for: `size` in bytes; `length` and `output` None choose by themselves."""

    model: str
    text: Path
    size: int
    tasks: str
    lists: dict[str, str]
    samples: int
    length: int | None
    seed: int
    output: Path | None
    dtype: str
    threads: int | None
    device: str = "cpu"
    weights: str = "auto"


@dataclass(frozen=True)
class TuneFacts:
    """What only the model can tell: the candidates, and `full`, the full cache where that is a measure."""

    header: Header
    candidates: Candidates
    full: Settings | None


class TuneWork(EvalSession[TuneFacts]):
    """The model that is tuned for, and every case that a round may ask for."""

    def __init__(self, options: TuneOptions, tasks: dict[str, Task] | None = None) -> None:
        """Load the model, and work out the candidates; `tasks` are those of the options, where they have been made.

        Raises: WindlassError for what cannot be honoured.
        """
        if options.threads is not None:
            torch.set_num_threads(options.threads)
        tasks = tasks or tasks_on(options.text, options.tasks)
        model, tokenizer = load(options.model, options.dtype, options.device, options.weights)
        ids = encode(tokenizer, read_text(options.text, f"text file {options.text}"), is_start=True)
        trained = trained_length(model.config.get_text_config())
        shapes = layer_shapes(model)
        found = candidates_of(model, shapes, ids, options.lists, options.size, options.length, trained)
        # A model reads no further than it was trained to without help, so beyond that it is no measure.
        fits = found.length <= (trained or FULL_TOKENS)
        full = Settings(Budget(ALL), CacheOptions(policy=Recent(), positions="original")) if fits else None
        self._grid = Grid(tasks, [found.length], [*([full] if full else []), *found.settings])
        self._facts = TuneFacts(header_of(options.model, options.seed, model), found, full)
        self._samples = options.samples
        super().__init__(Runner(model, tokenizer, options.seed), planned(self._grid, options.samples, options.seed))

    def facts(self) -> TuneFacts:
        if not self._facts.candidates.is_whole:
            self.runner.check(self._grid, self._samples, is_aware=False)
        return self._facts


class Tuning:
    """The candidates, and the file that their cases go to.

    `is_whole`: every candidate holds the whole text, so there is nothing to measure.
    """

    def __init__(
        self, options: TuneOptions, note: Callable[[str], None], executor: Executor[TuneFacts] | None = None
    ) -> None:
        """Work out the candidates, and open the file; `note` is told what was left out or amended.

        Without an `executor` the model is loaded, and asked, in this process.

        Raises: WindlassError for what cannot be honoured, before anything is run.
        """
        self._tasks = tasks_on(options.text, options.tasks)
        self._executor = executor or InProcess(TuneWork(options, self._tasks))
        facts = self._executor.facts
        found, self._full = facts.candidates, facts.full
        for line in found.left_out:
            note(f"windlass: note: left out: {line}")
        self.length, self.settings, self.is_whole = found.length, found.settings, found.is_whole
        self.output = options.output or Path(f"tune-{shown_name(options.model).replace('/', '-')}.jsonl")
        self._seed, self._samples = options.seed, options.samples
        if not self.is_whole:
            self._results = open_results(self.output, facts.header, note)

    def run(self, progress: Callable[[int, int, str], None]) -> bool:
        """Run what the file lacks, and write it there; whether that was done before an interrupt.

        `progress` is called with (cases done, cases in all, what comes next). A further run goes on from there.
        """
        rounds = rounds_of(len(self.settings), self._samples)
        each_text = [(count - before) * (size + (self._full is not None)) for before, count, size in rounds]
        total, done = sum(each_text) * len(self._tasks), 0
        left: Sequence[Settings] = self.settings

        def started(case: CasePlan) -> None:
            progress(done, total, f"{case.settings.labels['policy'].partition('(')[0]} {case.spec.label}")

        try:
            for before, count, size in rounds:
                if before:
                    left = [each.settings for each in ranked(left, self.cases, before)][:size]
                asked = self._planned(left, before, count)
                missing = [case for case in asked if not self._is_done(case)]
                done += len(asked) - len(missing)
                for batch, cases in self._executor.measure(missing, 1, started):
                    self._results.add(cases)
                    done += len(batch)
        except KeyboardInterrupt:
            return False
        return True

    @property
    def cases(self) -> list[Case]:
        """Those of the file that this run asks for, or a round of it may."""
        wanted = {each for case in self._planned(self.settings, 0, self._samples) for each in case.identities}
        return [case for identity, case in self._results.cases.items() if identity in wanted]

    @property
    def ranking(self) -> list[CandidateResult]:
        """The candidates that have cases, the best first."""
        return ranked(self.settings, self.cases)

    @property
    def full(self) -> CandidateResult | None:
        """The full cache on the same texts; None where it was not run."""
        return next(iter(ranked([self._full], self.cases)), None) if self._full else None

    def _planned(self, settings: Sequence[Settings], before: int, count: int) -> list[CasePlan]:
        """The cases of texts number `before` up to `count`, those of the full cache first."""
        grid = Grid(self._tasks, [self.length], [*([self._full] if self._full else []), *settings])
        return [case for case in planned(grid, count, self._seed) if case.spec.number >= before]

    def _is_done(self, case: CasePlan) -> bool:
        return all(each in self._results.cases for each in case.identities)


def rounds_of(candidates: int, samples: int) -> list[tuple[int, int, int]]:
    """Per round: texts done before it, texts done after it, and how many candidates take part."""
    counts = sorted({-(-samples // share) for share in SHARES})
    sizes = [max(min(LEAST_LEFT, candidates), -(-candidates // 2**number)) for number in range(len(counts))]
    return list(zip([0, *counts], counts, sizes, strict=False))
