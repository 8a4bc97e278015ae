"""Sizes, seeds and models that the tests share. No test needs the network or files from outside."""

import gc
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any
from zlib import crc32

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["RAY_AUTH_MODE"] = "token"  # read when Ray is imported, which some test modules do
os.environ["RAY_AUTH_TOKEN"] = token_hex(32)
os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # without it no product on a GPU is deterministic

import jaxtyping
import pytest
import torch

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # Triton reads it once, when a kernel is defined
if TYPE_CHECKING:
    from tests.helpers.models import Models, Text
else:
    pytest.register_assert_rewrite("tests.helpers")  # before any of them is imported

from transformers import PreTrainedModel

import tests.helpers.checked
import windlass
from windlass import kernels
from windlass.evals.ray_cluster import connected
from windlass.hf.cpu_decoder import FewTokensLayer
from windlass.kernels import cpu
from windlass.testing import VOCABULARY, tiny_model

for name in [each for each in os.environ if each.startswith("WINDLASS_") and each != "WINDLASS_CPU"]:
    del os.environ[name]  # an option of the command line
if torch.cuda.is_available():
    os.environ["WINDLASS_DEVICE"] = "cpu"  # the library's device, as texts of both are compared
torch.set_num_threads(1)
# Fills torch.empty with NaN, so that reads of unwritten memory show.
torch.use_deterministic_algorithms(True)


CHECKED_CASES = 12  # one in this many
QUICK_CALLS = 1  # of each function in a test, whose shapes are checked in `make test`
MODEL_CASES = 8  # one in this many is not slow, of a test that in each reads a model, or is interpreted
MODELS = {"attached_model", "plain_model", "one_layer"}
FAMILIES = Path(__file__).parent / "hf"
# Their faults are in combinations of two arguments, but for the few cases in Triton's interpreter.
KERNELS = Path(__file__).parent / "kernels"
IS_CHECKED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow most cases that differ little, and choose the cases in which shapes are checked.

    `make test-all` runs all cases of a test. `make test` runs, of a test with several arguments, as few cases as have
    each value of each of them, or each pair of values where it is a kernel's. And of those that are left, one in eight
    where each case reads a model or runs in Triton's interpreter. Which of them it is differs from test to test: all
    families are read by some of them.

    Annotations of shapes are checked in every test, but not in all of its cases: a check takes longer than most
    functions do.

    Long texts say nothing of shapes that short ones do not. `tests/helpers/checked.py` ends those of a long test.
    """
    _mark_combinations(items)
    _mark_models(items)
    cases: Counter[str] = Counter()
    for item in items:
        name = item.nodeid.partition("[")[0]
        item.stash[IS_CHECKED] = cases[name] % CHECKED_CASES == 0 and item.get_closest_marker("slow") is None
        cases[name] += 1


def _quick(items: Iterable[pytest.Item]) -> dict[str, list[pytest.Item]]:
    """The cases of each test that are not slow."""
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.get_closest_marker("slow") is None:
            cases[item.nodeid.partition("[")[0]].append(item)
    return cases


def _values(item: pytest.Item) -> list[tuple[str, str]]:
    """The arguments of a case."""
    params: dict[str, object] = getattr(getattr(item, "callspec", None), "params", {})
    return sorted((name, repr(value)) for name, value in params.items())


def _mark_combinations(items: list[pytest.Item]) -> None:
    combined = (item for item in items if len(_values(item)) > 1)
    for cases in _quick(combined).values():
        size = 2 if KERNELS in cases[0].path.parents and "triton" not in cases[0].path.name else 1
        values = [{*combinations(_values(each), size)} for each in cases]
        missing, kept = set[Any]().union(*values), set[int]()
        while missing:
            most = max(range(len(cases)), key=lambda at: len(values[at] & missing))
            kept.add(most)
            missing -= values[most]
        for number in {*range(len(cases))} - kept:
            cases[number].add_marker("slow")


def _mark_models(items: list[pytest.Item]) -> None:
    with_models = (
        item
        for item in items
        if MODELS & {*getattr(item, "fixturenames", ())} or FAMILIES in item.path.parents or "triton" in item.path.name
    )
    for test, its_cases in _quick(with_models).items():
        kept = crc32(test.encode()) % MODEL_CASES % len(its_cases)
        for number, item in enumerate(its_cases):
            if number % MODEL_CASES != kept:
                item.add_marker("slow")


def pytest_collection_finish(session: pytest.Session) -> None:
    """Keep what was imported and collected out of the collections of garbage, each of which would look at all of it."""
    if session.config.option.markexpr == "not slow":
        tests.helpers.checked.CHECKS.most_calls = QUICK_CALLS
    gc.collect()
    gc.freeze()


def pytest_runtest_setup(item: pytest.Item) -> None:
    tests.helpers.checked.CHECKS.begin(item.stash[IS_CHECKED])
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def _cpu_is_known() -> None:
    """The library asks for the CPU's instruction set, and warns of it, before a test puts another in its place."""
    if cpu.instruction_sets():
        kernels.has_decode("cpu")


@pytest.fixture(scope="session")
def ray() -> Iterator[None]:
    """A local Ray with three processors."""
    if find_spec("ray") is None:
        pytest.skip("needs windlass[ray]")
    with connected("local", 3):
        yield


@pytest.fixture
def many_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many calls of a function are checked as in `make test-all`."""
    monkeypatch.setattr(tests.helpers.checked.CHECKS, "most_calls", tests.helpers.checked.MOST_CALLS)


@pytest.fixture
def any_type() -> None:
    """Arguments of the wrong type reach the code, whose errors are tested. Otherwise annotations refuse them first."""
    jaxtyping.config.update("jaxtyping_disable", True)


@pytest.fixture(scope="session")
def plain_model() -> "Models":
    """A tiny model of a family that is never attached: transformers' own results."""
    return _cached(tiny_model)


@pytest.fixture(scope="session")
def attached_model() -> "Models":
    """A tiny model of a family, attached, and equal to `plain_model`'s. Not to be changed."""
    has_kernels, kernel = kernels._is_compiled, FewTokensLayer._kernel

    def made(family: str) -> PreTrainedModel:
        # Proven by the kernels, although the first test that asks for it may hide them.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(kernels, "_is_compiled", has_kernels)
            patch.setattr(FewTokensLayer, "_kernel", kernel)
            return windlass.attach(tiny_model(family))

    return _cached(made)


def _cached(make: "Models") -> "Models":
    models: dict[str, PreTrainedModel] = {}

    def get(family: str) -> PreTrainedModel:
        if family not in models:
            models[family] = make(family)
        return models[family]

    return get


@pytest.fixture(scope="session")
def text() -> "Text":
    """Random token ids of shape (rows, tokens). Another seed gives another text."""

    def make(tokens: int, rows: int = 1, seed: int = 0) -> torch.Tensor:
        return torch.randint(VOCABULARY, (rows, tokens), generator=torch.Generator().manual_seed(seed))

    return make
