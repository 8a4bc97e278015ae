"""Sizes, seeds and models that the tests share. No test needs the network or files from outside."""

import os
from collections import Counter, defaultdict
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING
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
from windlass.evals.ray_cluster import connected
from windlass.testing import VOCABULARY, tiny_model

for name in [each for each in os.environ if each.startswith("WINDLASS_") and each != "WINDLASS_CPU"]:
    del os.environ[name]  # an option of the command line
if torch.cuda.is_available():
    os.environ["WINDLASS_DEVICE"] = "cpu"  # the library's device, as texts of both are compared
torch.set_num_threads(1)
# Fills torch.empty with NaN, so that reads of unwritten memory show.
torch.use_deterministic_algorithms(True)


CHECKED_CASES = 12  # one in this many
COMBINED_CASES = 6  # one in this many is not slow, and each that has a value for the first time
MODEL_CASES = 3  # one in this many is not slow, of a test that in each reads a model, or is interpreted
MODELS = {"attached_model", "plain_model", "one_layer"}
FAMILIES = Path(__file__).parent / "hf"
# Their faults are in combinations, and their cases are quick, but for those in Triton's interpreter.
KERNELS = Path(__file__).parent / "kernels"
IS_CHECKED = pytest.StashKey[bool]()


@pytest.hookimpl(tryfirst=True)  # before `-m` chooses
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark as slow most cases that differ little, and choose the cases in which shapes are checked.

    `make test-all` runs all cases of a test. `make test` runs, of a test with several arguments, each value of each of
    them. And of those that are left, one in three where each case reads a model or runs in Triton's interpreter. Which
    of the three it is differs from test to test: all families are read by some of them.

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


def _mark_combinations(items: list[pytest.Item]) -> None:
    cases: Counter[str] = Counter()
    known: set[tuple[str, str, str]] = set()
    for item in items:
        spec = getattr(item, "callspec", None)
        is_quick = KERNELS in item.path.parents and "triton" not in item.path.name
        if spec is None or len(spec.params) < 2 or is_quick:
            continue
        test = item.nodeid.partition("[")[0]
        values = {(test, name, repr(value)) for name, value in spec.params.items()}
        if cases[test] % COMBINED_CASES and values <= known:
            item.add_marker("slow")
        known |= values
        cases[test] += 1


def _mark_models(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        has_model = MODELS & {*getattr(item, "fixturenames", ())} or FAMILIES in item.path.parents
        if item.get_closest_marker("slow") is None and (has_model or "triton" in item.path.name):
            cases[item.nodeid.partition("[")[0]].append(item)
    for test, its_cases in cases.items():
        kept = crc32(test.encode()) % MODEL_CASES % len(its_cases)
        for number, item in enumerate(its_cases):
            if number % MODEL_CASES != kept:
                item.add_marker("slow")


def pytest_runtest_setup(item: pytest.Item) -> None:
    tests.helpers.checked.CHECKS.begin(item.stash[IS_CHECKED])
    if item.get_closest_marker("gpu") is not None and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def ray() -> Iterator[None]:
    """A local Ray with three processors."""
    if find_spec("ray") is None:
        pytest.skip("needs windlass[ray]")
    with connected("local", 3):
        yield


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
    return _cached(lambda family: windlass.attach(tiny_model(family)))


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
