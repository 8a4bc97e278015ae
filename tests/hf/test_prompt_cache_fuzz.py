"""Files that someone spoiled and signed again: refused in one line, or loaded consistently, never anything else."""

import json
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models
from tests.helpers.prompt_cache_files import CacheFile, Honest, honest_files
from tests.helpers.prompt_cache_judge import LOADED, REFUSED, verdict
from tests.helpers.prompt_cache_mutations import mutated
from windlass import KVCache, PromptCacheError
from windlass.hf import prompt_cache
from windlass.hf.attach import attached
from windlass.policies import H2O, TOVA, Recent, SnapKV

BATCHES, MUTATIONS = 4, 50  # of them each
Spoil = Callable[[CacheFile], None]


@pytest.fixture(scope="module")
def files(attached_model: Models, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Honest]:
    return {each.name: each for each in honest_files(attached_model, tmp_path_factory.mktemp("honest"))}


@pytest.fixture(autouse=True)
def _small_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same verdict on every machine, and no memory of gigabytes asked for where a check is missing."""
    monkeypatch.setattr(prompt_cache, "memory_of", lambda _: 2**30)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_spoiled_files_are_refused_or_say_what_they_load(batch: int, files: dict[str, Honest], tmp_path: Path) -> None:
    """Files with a right checksum and spoiled contents, loaded: a result or one clear line."""
    words: Counter[str] = Counter()
    for seed in range(batch * MUTATIONS, (batch + 1) * MUTATIONS):
        draw = random.Random(seed)
        honest = list(files.values())[draw.randrange(len(files))]
        what, data = mutated(honest, draw)
        word, why = verdict(honest, data, tmp_path / "spoiled")
        assert word in (REFUSED, LOADED), f"seed {seed}, {honest.name}, {what}: {word}, {why}"
        words[word] += 1
    assert words[REFUSED] > words[LOADED] > 5


def field(*path: str | int, value: object) -> Spoil:
    """The field at `path` of the document becomes `value`."""

    def spoil(file: CacheFile) -> None:
        document = file.document
        holder = document
        for key in path[:-1]:
            holder = holder[key]  # type: ignore[index]  # a list at some places
        holder[path[-1]] = value  # type: ignore[index]  # a list at some places
        file.contents = json.dumps(document)

    return spoil


def text(contents: str) -> Spoil:
    """The document becomes `contents`."""

    def spoil(file: CacheFile) -> None:
        file.contents = contents

    return spoil


def tensors(change: Callable[[str, torch.Tensor], torch.Tensor | None]) -> Spoil:
    """Replace every tensor by the result of `change` for its name and itself. None removes it."""

    def spoil(file: CacheFile) -> None:
        made = {name: change(name, tensor.clone()) for name, tensor in file.tensors.items()}
        file.tensors = {name: tensor for name, tensor in made.items() if tensor is not None}

    return spoil


def of(end: str, change: Callable[[torch.Tensor], torch.Tensor | None]) -> Spoil:
    """As `tensors`, for those whose names end so."""
    return tensors(lambda name, tensor: change(tensor) if name.endswith(end) else tensor)


def swapped(tensor: torch.Tensor, dim: int) -> torch.Tensor:
    """With its first two entries along `dim` exchanged."""
    index = torch.tensor([1, 0, *range(2, tensor.shape[dim])])
    return tensor.index_select(dim, index)


HOSTILE: dict[str, tuple[str, Spoil, str]] = {
    "positions far out": ("recent", of("positions", lambda p: p.fill_(2**30)), "positions outside of its text"),
    "positions of 0": ("h2o", of("positions", lambda p: p.fill_(0)), "a position twice"),
    "positions below": ("recent", of("positions", lambda p: p.fill_(-7)), "positions outside of its text"),
    "two kv heads": ("recent", of("keys", lambda k: k[:, :2]), "layers.0.keys is"),
    "keys of NaN": ("recent", of("keys", lambda k: k.fill_(torch.nan)), "layers.0.keys has numbers that are not"),
    "values of inf": ("recent", of("values", lambda v: v.fill_(torch.inf)), "layers.0.values has numbers that"),
    "scales of NaN": ("snapkv, int8", of("scales", lambda s: s.fill_(torch.nan)), "scales has numbers that are not"),
    "means of NaN": ("snapkv, int8", of("centres", lambda m: m.fill_(torch.nan)), "centres has numbers that are not"),
    "state of NaN": ("h2o", of("mass", lambda m: m.fill_(torch.nan)), "mass has numbers that are not finite"),
    "state below 0": ("h2o", of("mass", lambda m: m.fill_(-1)), "mass has numbers below 0"),
    "too much merged": ("merged", of("merged", lambda m: m.fill_(99)), "has merged other than its"),
    "observed too much": ("statistics", of("count", lambda c: c.fill_(99)), "has observed other numbers"),
    "ids beyond": ("recent", of("tokens.1", lambda t: t.fill_(10**6)), "not among the model's 97"),
    "fewer ids": ("recent", of("tokens.1", lambda t: t[1:]), "tensor tokens.1 is"),
    "a missing tensor": ("recent", of("0.values", lambda _: None), "tensor layers.0.values is missing"),
    "ids without leave": ("recent", field("has_tokens", value=False), "is not expected"),
    "another dtype": ("recent", of("0.keys", lambda k: k.half()), "layers.0.keys is"),
    "a slot too many": ("recent", of("positions", lambda p: torch.cat((p, p[..., :1]), -1)), "tensor layers.0.keys"),
    "ring slots beyond": ("ring", of("exact_slots", lambda s: s.fill_(12)), "slots in full precision that it has not"),
    "ring slots exchanged": (
        "ring",
        of("exact_slots", lambda s: swapped(s, 2)),
        "other tokens in full precision than in their slots",
    ),
    "ring tokens exchanged": ("ring", of("exact_serials", lambda s: swapped(s, 1)), "other tokens in full precision"),
    "ring count": ("ring", of("exact_written", lambda w: w + 1), "has written"),
    "recall names others": ("recall", of("recall_index", lambda i: i.fill_(99)), "holds other tokens than the 36"),
    "recall names by half": ("recall", of("recall_index", lambda i: i + 0.5), "holds other tokens than the 36"),
    "recall names exchanged": ("recall by head", of("recall_index", lambda i: swapped(i, 2)), "holds tokens elsewhere"),
    "recall far out": ("recall", of("recall.positions", lambda p: p.fill_(2**30)), "recalls positions outside"),
    "recall of one more": ("recall", of("recall.positions", lambda p: p + 1), "recalls positions outside"),
    "recall of NaN": (
        "recall",
        of("recall.key_scales", lambda s: s.fill_(torch.nan)),
        "has numbers that are not finite",
    ),
    "recall of fewer": (
        "recall",
        of("recall.value_codes", lambda c: c[:, :, 1:]),
        "tensor layers.0.recall.value_codes",
    ),
    "recall of 9": ("recall", field("options", "recall", value=9), "must be a multiple of 8"),
    "recall without a budget": ("recall", field("options", "limits", "budget", value=None), "needs a budget"),
    "columns": ("edited", field("rows", 0, "columns", value=1), "tokens in 1 columns"),
    "no json": ("recent", text("not json"), "no JSON that can be read"),
    "deep json": ("recent", text("[" * 100_000), "no JSON that can be read"),
    "deep json, closed": ("recent", text("[" * 100_000 + "]" * 100_000), "no JSON that can be read"),
    "a list": ("recent", text("[]"), "its header is a list of 0: "),
    "a field twice": ("recent", text('{"batch": 1, "batch": 2}'), "a field is there twice"),
    "a huge number": ("recent", text('{"batch": 1' + "0" * 5000 + "}"), "no JSON that can be read"),
    "an extra field below": ("recent", field("layers", 0, "\x1b[2J", value=1), "unknown field layers.0.\\x1b[2J"),
    "a missing field": ("recent", text("{}"), "its header has no field model"),
    "a version in the header": ("recent", field("version", value=1), "unknown field version"),
    "no rows": ("recent", field("rows", value=[]), "it has 0 rows"),
    "sinks of a row": ("recent", field("rows", 1, "sinks", value=5), "a row has sinks of its own"),
    "an extra field": ("recent", field("more", value=1), "unknown field more"),
    "no layers": ("recent", field("layers", value=[]), "it has 0 layers, this model has 2"),
    "budget of text": (
        "recent",
        field("options", "limits", "budget", value="x"),
        "options.limits.budget in its header",
    ),
    "a huge batch": ("recent", field("options", "batch", value=10**9), "a batch of 1000000000"),
    "seen 10**18": ("without ids", field("rows", 0, "tokens_seen", value=10**18), "rows.0.tokens_seen in its header"),
    "seen more": (
        "without ids",
        field("rows", 0, "tokens_seen", value=6),
        "it has seen 6 tokens in 5",
    ),
    "NaN": ("recent", field("rows", 0, "columns", value=float("nan")), "NaN is no number"),
    "a flag of 1": ("recent", field("has_tokens", value=1), "has_tokens in its header is 1: "),
    "an unknown policy": ("recent", field("policy", "name", value="best"), "which this windlass lacks"),
    "a policy of text": ("statistics", field("policy", "fields", "future", value="x"), "not a number"),
    "a policy of half": ("statistics", field("policy", "fields", "future", value=9.5), "future of its policy is 9.5"),
    "another label": ("statistics", field("policy", "label", value="Recent()"), "and called Recent()"),
    "a label of two lines": (
        "recent",
        field("policy", "label", value="a\nb"),
        "policy.label in its header: it is not a text of one line",
    ),
    "a store of nothing": ("snapkv, int8", field("options", "store", value="int9"), "is not a store"),
    "a merge of nothing": ("merged", field("options", "merge", value="mix"), "is not a rule"),
    "huge positions": ("recent", field("options", "positions", value="clamp(1000000000)"), "GiB"),
    "huge self extend": (
        "recent",
        field("options", "positions", value=f"self_extend({10**30}, 5)"),
        "group must be from 1",
    ),
    "a huge ring": ("empty", field("options", "store", value="int4(newest=1000000000)"), "GiB"),
    "a huge budget": ("h2o", field("options", "limits", "budget", value=2**30), "GiB"),
    "a huge chunk": ("h2o", field("options", "limits", "chunk", value=2**30), "GiB"),
    "a far end": ("edited", field("rows", 0, "next_position", value=2**30), "GiB"),
    "another window": ("windows", field("layers", 0, "sliding_window", value=3), "a sliding window of 3"),
    "nothing evicted": ("windows", field("layers", 1, "has_evicted", value=False), "though none was evicted"),
    "a layer without": ("recent", field("layers", 0, value=None), "a layer has no tokens"),
    "prompts backwards": ("recent", field("rows", 0, "prompts", value=[[5, 2]]), "rows.0 in its header: its prompts"),
    "edited later than read": ("recent", field("rows", 0, "since_edit", value=99), "since its last edit"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_for_what_is_wrong(name: str, files: dict[str, Honest], tmp_path: Path) -> None:
    kind, spoil, says = HOSTILE[name]
    honest = files[kind]
    file = CacheFile(honest.file.contents, dict(honest.file.tensors), honest.file.metadata)
    spoil(file)
    path = tmp_path / "file"
    path.write_bytes(file.to_bytes())
    with pytest.raises(PromptCacheError) as caught:
        KVCache.load(path, honest.model, policy=honest.policy)
    message = str(caught.value)
    assert says in message
    assert message.startswith(f"{path} ")
    assert message.isprintable()
    assert len(message) < 600


def test_a_refused_file_leaves_the_model_alone(files: dict[str, Honest], tmp_path: Path) -> None:
    """Nor does one that is loaded tell the model its mean keys: later caches would code by them."""
    honest = files["ring"]
    attachment = attached(honest.model)
    before = attachment.key_means
    file = CacheFile(honest.file.contents, dict(honest.file.tensors), honest.file.metadata)
    of("centres", lambda mean: mean.fill_(1e30))(file)
    path = tmp_path / "file"
    path.write_bytes(file.to_bytes())
    try:
        attachment.key_means = None
        KVCache.load(path, honest.model)
        assert attachment.key_means is None
        of("positions", lambda p: p.fill_(2**30))(file)
        path.write_bytes(file.to_bytes())
        with pytest.raises(PromptCacheError):
            KVCache.load(path, honest.model)
        assert attachment.key_means is None
    finally:
        attachment.key_means = before


def test_every_kind_of_honest_file_loads_as_it_is(files: dict[str, Honest], tmp_path: Path) -> None:
    for honest in files.values():
        assert verdict(honest, honest.file.to_bytes(), tmp_path / "file") == (LOADED, "decodes"), honest.name


@pytest.mark.parametrize("seed", range(5))
def test_whatever_edits_made_it_a_saved_cache_loads(seed: int, attached_model: Models, tmp_path: Path) -> None:
    """The checks refuse no file that `save` writes, whatever came before."""
    draw = random.Random(seed)
    model: PreTrainedModel = attached_model(draw.choice(("llama", "gemma2")))
    policy = draw.choice(
        (
            Recent(),
            H2O(),
            TOVA(),
            SnapKV(observed_queries=3),
        )
    )
    store = draw.choice(("plain", "int8", "int4(sinks=2, newest=5)", "int8(newest=3)", "int4(sinks=3)"))
    merge = draw.choice((None, "mean_count", "pick(next)")) if "(" not in store else None
    budget = 14 if merge else draw.choice((None, 14, 30))
    cache, other = (windlass.KVCache(model, budget, policy, 2, 3, 7, "compact", 2, 5, store, merge) for _ in range(2))
    windlass.prefill(model, other, [[1, 2, 3, 4, 5, 6, 7, 8, 9], [4, 5]])
    done = 0
    for _ in range(16):
        try:
            change(model, cache, other, draw)
        except windlass.UsageError:
            continue
        done += 1
        cache.save(tmp_path / "file")
        data = (tmp_path / "file").read_bytes()
        saved = Honest("edited", model, None, CacheFile.read(tmp_path / "file"))
        assert verdict(saved, data, tmp_path / "file") == (LOADED, "decodes")
    assert done > 5


def change(model: PreTrainedModel, cache: windlass.KVCache, other: windlass.KVCache, draw: random.Random) -> None:
    """Read some tokens, or edit the text, in one of many ways."""
    start = draw.randrange(min(cache.next_positions) + 1)
    stop, end, row = (
        draw.randint(start, max(cache.next_positions)),
        max(cache.next_positions),
        draw.choice((None, 0, 1)),
    )
    tokens = draw.choice((1, 1, 2, 5, 19, 40))
    ids = [[draw.randrange(97) for _ in range(draw.choice((tokens, 0)))] for _ in range(2)]
    edits: list[Callable[[], object]] = [
        *[lambda: windlass.prefill(model, cache, ids if all(ids) else [[5], [6] * tokens])] * 5,
        lambda: cache.rollback(draw.choice((1, 2, 4))),
        lambda: cache.rollback([draw.randrange(3), draw.randrange(3)]),
        lambda: cache.drop(start, stop, row),
        lambda: cache.keep(start, stop, row),
        lambda: cache.shift(start, end, draw.randint(-3, 3)),
        lambda: cache.divide(0, end, 2, row),
        lambda: cache.copy(0, 1),
        lambda: cache.splice(other, draw.randrange(2), draw.randrange(2)),
        lambda: cache.select_rows(torch.tensor([1, 0])),
        lambda: cache.compress(draw.choice((12, 9))),
    ]
    draw.choice(edits)()
