"""Processes that share a model's heads, against one that has all of them: the same text, the same tokens kept.

The oracle is the same case in a single process. The processes, two or four, are started once for all cases.
"""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

import windlass
from tests.helpers import ranks
from tests.helpers.ranks import Case, Found
from tests.helpers.scorers import scorer_of

# Plans that leave each rank its own kv heads, and plans that give each rank all of them.
SPLIT = ("llama", "mistral", "qwen3", "gemma2", "cohere", "granite")
WHOLE = ("phi3", "olmo2")
PER_HEAD = (
    *("random", "snapkv", "key_norm", "key_diff", "lag_kv", "leverage", "compactor", "r_kv", "expected_attention"),
    *("tri_attention", "kvzip", "in_groups(h2o)", "linear_scorer(FILES/scorer)"),
)
# One ranking for all heads, or all layers: computed on each rank, or with one all-reduce.
SHARED = ("recent", "tova", "pyramid(tova)")
OTHERS = {
    "compact": Case("llama", {"policy": "h2o", "positions": "compact"}),
    "batch": Case("llama", {"policy": "snapkv", "batch": 2}),
    "int4": Case("llama", {"policy": "key_diff", "store": "int4(sinks=1, newest=2)"}),
    "merge": Case("llama", {"policy": "h2o", "merge": "mean_count"}),
    "dmc": Case("llama", {"policy": "dmc", "merge": "weighted"}),
    "recall": Case("llama", {"policy": "key_diff", "recall": 8}),
    "rollback": Case("llama", {"policy": "tova"}, then="rollback"),
    "composite": Case("smollm3", {"policy": "composite(snapkv)"}),
    "compress": Case("llama", {"policy": "snapkv"}, then="compress"),
    "fit": Case("llama", {"policy": "recent", "budget": None}, then="fit"),
    "divergent": Case("llama", {"policy": "recent", "budget": None}, then="divergent"),
    "sampled": Case("llama", {"policy": "h2o"}, tokens=9, seed=3),
    "latent": Case("minicpm3", {"policy": "key_diff"}),
    "recurrent": Case("qwen3_next", {"policy": "h2o"}),
}
FILES: dict[str, dict[str, Any]] = {
    "tova": {"policy": "tova"},
    "statistics": {"policy": "expected_attention"},
    "low_bit": {"policy": "h2o", "store": "int8(sinks=1, newest=2)"},
    "recalled": {"policy": "key_diff", "recall": 8},
}
REFUSED = {
    "value norms": (
        Case("llama", {"policy": "by_value_norm(tova)"}),
        "PolicyError: ByValueNorm(policy=TOVA()) ranks all heads of a layer alike, and each of {} ranks has only some",
    ),
    "merge of all": (Case("llama", {"policy": "tova", "merge": "mean_count"}), "merge mean_count looks for one slot"),
    "heads": (Case("llama@3"), "has num_attention_heads=15, num_key_value_heads=3, which {} processes cannot share. "),
    "queries of latents": (Case("minicpm3", {"policy": "h2o"}), "PolicyError: H2O() ranks by queries, and here each"),
    "recall of latents": (Case("minicpm3", {"recall": 8}), "recall=8 picks tokens by queries"),
}
CASES = (
    {f"{family} h2o": Case(family, {"policy": "h2o"}) for family in (*SPLIT, *WHOLE)}
    | {f"llama {policy}": Case("llama", {"policy": policy}) for policy in (*PER_HEAD, *SHARED)}
    | OTHERS
    | {f"{name} to several": Case("llama", options, load=f"{name}.one") for name, options in FILES.items()}
    | {f"{name} to one": Case("llama", options, save=f"{name}.several") for name, options in FILES.items()}
    | {name: case for name, (case, _) in REFUSED.items()}
    | {"served": Case("llama", then="serve")}
    | {"a rank dies": Case("qwen3", then="die")}  # the last one, for there is no other after it
)
# In `make test`: heads that are shared, their files and their recall.
QUICK = ("llama h2o", "recall", "sampled", "tova to several", "tova to one", "heads")

Load = Callable[[str], PreTrainedModel]


def marked(names: Iterable[str]) -> list[Any]:
    """Slow but for those of `QUICK`."""
    return [pytest.param(name, marks=[pytest.mark.slow] * (name not in QUICK)) for name in names]


@pytest.fixture(scope="module", params=[2, pytest.param(4, marks=pytest.mark.slow)])
def size(request: pytest.FixtureRequest) -> int:
    """How many processes share a model."""
    count: int = request.param
    return count


@pytest.fixture(scope="module")
def folder(size: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp(f"ranks{size}")


@pytest.fixture(scope="module")
def model_of(folder: Path) -> Load:
    """A tiny model in one process."""
    loaded: dict[str, PreTrainedModel] = {}

    def load(name: str) -> PreTrainedModel:
        if name not in loaded:
            path = ranks.folder_of(folder / "models", name)
            loaded[name] = windlass.attach(AutoModelForCausalLM.from_pretrained(path).eval())
        return loaded[name]

    return load


@pytest.fixture(scope="module")
def of_ranks(request: pytest.FixtureRequest, size: int, folder: Path, model_of: Load) -> dict[str, list[Found]]:
    """Results of each process in each case, or in those of `QUICK` if no others are tested."""
    items = [each for each in request.session.items if each.path == request.path]
    is_quick = all(each.get_closest_marker("slow") is None for each in items)
    cases = {name: CASES[name] for name in QUICK} if is_quick else CASES
    for case in cases.values():
        ranks.folder_of(folder / "models", case.model)
    scorer_of(folder / "scorer", model_of("llama"), heads=4)
    for name, options in FILES.items():
        ranks.found(Case("llama", options, save=f"{name}.one"), model_of("llama"), folder)
    ordered = dict(sorted(cases.items(), key=lambda named: (named[1].then == "die", named[1].model)))
    return ranks.run(folder, ordered, folder / "models", size)


@pytest.fixture
def both(
    request: pytest.FixtureRequest, folder: Path, model_of: Load, of_ranks: dict[str, list[Found]]
) -> tuple[list[Found], Found]:
    """Results of the ranks in a case, and of one process."""
    case = CASES[request.param]
    return of_ranks[request.param], ranks.found(case, model_of(case.model), folder)


def same_text(ranks_found: list[Found], one: Found) -> bool:
    assert [each.error for each in (*ranks_found, one)] == [""] * (len(ranks_found) + 1)
    return all(each.tokens == one.tokens for each in ranks_found)


def same_positions(ranks_found: list[Found], one: Found, is_split: bool = True) -> bool:
    """Return True if each layer keeps the same tokens: each rank those of its heads, or all of them the same."""
    layers = zip(*(each.positions for each in ranks_found), one.positions, strict=True)
    same = []
    for *own, whole in layers:
        if len({each.shape for each in own}) > 1:
            return False
        has_parts = is_split and whole.shape[1] == own[0].shape[1] * len(own)
        kept = torch.cat(own, 1) if has_parts else own[0]
        same.append(torch.equal(kept, whole) and (is_split or all(torch.equal(own[0], each) for each in own)))
    return all(same)


@pytest.mark.slow
@pytest.mark.parametrize("both", marked(f"{family} h2o" for family in SPLIT), indirect=True)
def test_ranks_of_a_family_share_its_heads(size: int, both: tuple[list[Found], Found]) -> None:
    of_all, one = both
    assert same_text(of_all, one)
    assert same_positions(of_all, one)
    assert [each.nbytes * size for each in of_all] == [one.nbytes] * size
    assert f"rank 1 of {size}, with {4 // size} of 4 kv heads" in of_all[1].described


@pytest.mark.parametrize("both", marked(f"{family} h2o" for family in WHOLE), indirect=True)
def test_a_plan_that_gathers_keys_gives_each_rank_all_heads(size: int, both: tuple[list[Found], Found]) -> None:
    of_all, one = both
    assert same_text(of_all, one)
    assert same_positions(of_all, one, is_split=False)
    assert [each.nbytes for each in of_all] == [one.nbytes] * size
    assert f"rank 0 of {size}, with all kv heads: this model's plan gives each rank" in of_all[0].described


@pytest.mark.parametrize("both", marked(f"llama {policy}" for policy in (*PER_HEAD, *SHARED)), indirect=True)
def test_a_policy_keeps_what_it_keeps_in_one_process(both: tuple[list[Found], Found]) -> None:
    of_all, one = both
    assert same_text(of_all, one)
    assert same_positions(of_all, one)


@pytest.mark.parametrize("both", marked(OTHERS), indirect=True)
def test_options_and_edits_give_what_they_give_in_one_process(both: tuple[list[Found], Found]) -> None:
    of_all, one = both
    assert same_text(of_all, one)
    assert same_positions(of_all, one)


@pytest.mark.slow
def test_a_model_has_the_fingerprint_that_it_has_in_one_process(
    of_ranks: dict[str, list[Found]], model_of: Load, folder: Path
) -> None:
    own = ranks.found(CASES["phi3 h2o"], model_of("phi3"), folder)
    assert {each.fingerprint for each in of_ranks["phi3 h2o"]} == {own.fingerprint}


@pytest.mark.parametrize("both", marked(f"{name} to several" for name in FILES), indirect=True)
def test_a_file_of_one_process_goes_on_in_several(both: tuple[list[Found], Found]) -> None:
    of_all, one = both
    assert same_text(of_all, one)
    assert same_positions(of_all, one)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (f"{name} to one" not in QUICK)) for name in FILES]
)
def test_a_file_of_several_processes_is_that_of_one(
    size: int, name: str, of_ranks: dict[str, list[Found]], model_of: Load, folder: Path
) -> None:
    assert [each.error for each in of_ranks[f"{name} to one"]] == [""] * size
    texts = [ranks.found(Case("llama", load=f"{name}.{by}"), model_of("llama"), folder) for by in ("one", "several")]
    assert texts[1].error == ""
    assert texts[0].tokens == texts[1].tokens
    assert same_positions([texts[1], texts[1]], texts[0])


@pytest.mark.parametrize("name", marked(REFUSED))
def test_what_ranks_cannot_agree_on_is_refused_by_name(size: int, name: str, of_ranks: dict[str, list[Found]]) -> None:
    for each in of_ranks[name]:
        assert REFUSED[name][1].format(size) in each.error
    if name == "heads":
        assert of_ranks[name][0].error.endswith("Start one of: 1, 3")


@pytest.mark.slow
def test_an_engine_on_several_ranks_answers_as_in_one_process(
    of_ranks: dict[str, list[Found]], model_of: Load, folder: Path
) -> None:
    """A request that rank 0 refuses in the middle ends on all. The ranks end together."""
    one = ranks.found(CASES["served"], model_of("llama"), folder)
    led, *others = of_ranks["served"]
    assert led.error == one.error == ""
    assert led.tokens == one.tokens
    assert [led.tokens.count(end) for end in (-1, -2)] == [5, 1]
    assert [each.tokens for each in others] == [[-3]] * len(others)


@pytest.mark.slow
def test_a_rank_that_dies_ends_the_engine_of_the_other(of_ranks: dict[str, list[Found]]) -> None:
    """No time is told: a rank that went on waiting would have been ended with the test."""
    survivor, *dead = of_ranks["a rank dies"]
    assert survivor.error == "lost: the engine has stopped. Start the server again"
    assert dead == [Found()] * len(dead)
