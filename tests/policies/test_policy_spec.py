"""Policies from typed specs: names, arguments, files, and one clear line for each error."""

import re
from pathlib import Path

import pytest

from tests.helpers.models import Models
from windlass import CacheOptions, KVCache
from windlass.cache.options import policy_of
from windlass.core.errors import PolicyError, PromptCacheError, WindlassError
from windlass.policies import (
    H2O,
    NAMES,
    ByValueNorm,
    Composite,
    InChunks,
    KeyDiff,
    Policy,
    Pyramid,
    Random,
    Smoothed,
    SnapKV,
)

FILE = '''
from __future__ import annotations
from dataclasses import dataclass
from windlass.policies import Needs, Policy, Recent, Slots

@dataclass(frozen=True)
class Oldest(Policy):
    """Keeps the oldest tokens.

    Source: this test.
    Differs: nothing.
    """
    keep: int = 3
    needs = Needs(state=("a",))

    def score(self, slots: Slots):
        return -slots.positions.float() * self.keep
'''


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(FILE)
    return path


@pytest.mark.parametrize(
    "name", [*NAMES, *(policy.__name__ for policy in NAMES.values()), "KEY-DIFF", "keydiff", " h2o "]
)
def test_names_ignore_case_and_marks(name: str):
    policy = policy_of(name)
    plain = name.strip().lower().replace("_", "").replace("-", "")
    assert type(policy).__name__.lower() == plain
    assert policy == type(policy)()


@pytest.mark.parametrize(
    ("spec", "policy"),
    [
        ("SnapKV(observed_queries=16, pool=7)", SnapKV(16, 7)),
        ("snapkv( 8 )", SnapKV(8)),
        ("random(False, seed=-3)", Random(False, -3)),
        ("h2o()", H2O()),
        ("pyramid(snapkv)", Pyramid(SnapKV())),
        ("Pyramid(SnapKV(pool=7), beta=2.5)", Pyramid(SnapKV(pool=7), 2.5)),
        ("inchunks(size=4, policy=smoothed(ByValueNorm(h2o())))", InChunks(Smoothed(ByValueNorm(H2O())), 4)),
    ],
)
def test_arguments_are_literals(spec: str, policy: Policy):
    assert policy_of(spec) == policy


def test_the_repr_of_a_policy_loads_it():
    for policy in (SnapKV(4, 3), Random(True, 5), KeyDiff(), Composite(Smoothed(SnapKV(4, 3), 0.5))):
        assert policy_of(repr(policy)) == policy


def test_a_class_in_a_file_is_loaded_and_leaves_nothing_beside_it(file: Path):
    policy = policy_of(f"{file}:Oldest")
    assert repr(policy) == "Oldest(keep=3)"
    assert repr(policy_of(f"{file}:Oldest(keep=5)")) == "Oldest(keep=5)"
    assert [path.name for path in file.parent.iterdir()] == ["mine.py"]


def test_a_path_may_hold_any_sign(tmp_path: Path):
    path = tmp_path / "a (1):b" / "mine.py"
    path.parent.mkdir()
    path.write_text(FILE)
    assert repr(policy_of(f"{path}:Oldest(4)")) == "Oldest(keep=4)"


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        ("", "policy '' cannot be read. Use a name, Name(argument=number), Wrapper(name) or path/to/file.py:Class"),
        ("snapkv(pool=3", "policy 'snapkv(pool=3' cannot be read"),
        ("snapkv(**{})", "policy 'snapkv(**{})' cannot be read"),
        ("a.b(1)", "policy 'a.b(1)' cannot be read"),
        ("snapkv(pool=4)", "SnapKV: pool must be an odd number of at least 1, got 4"),
        ("snapkv(pol=5)", "got an unexpected keyword argument 'pol'. It takes snapkv(observed_queries: int = 32"),
        ("h2o(1)", "policy 'h2o(1)' cannot be made"),
        ("pyramid", "argument: 'policy'. It takes pyramid("),
        ("pyramid(snapvk)", "policy 'snapvk' is unknown. Did you mean snapkv?"),
        ("pyramid(snapkv(pool=4))", "SnapKV: pool must be an odd number of at least 1, got 4"),
        ("pyramid(snapkv(**{}))", "policy 'pyramid(snapkv(**{}))' cannot be read"),
        ("smoothed(smoothed(h2o))", "is smoothed already. Wrap the policy inside"),
        ("snapkv(pool='x')", "'x' is not a plain number"),
        ("snapkv(__import__('os').getpid())", "\"__import__('os').getpid()\" is not a plain number"),
        ("{file}:Policy", "policy '{file}:Policy' cannot be made: Can't instantiate abstract class"),
        ("{file}:Oldest(0.5, 1)", "cannot be made"),
    ],
)
def test_what_is_wrong_is_one_line(file: Path, spec: str, says: str):
    with pytest.raises(PolicyError, match=re.escape(says.replace("{file}", str(file)))) as caught:
        policy_of(spec.replace("{file}", str(file)))
    assert "\n" not in str(caught.value)


def test_numbers_of_the_wrong_kind_are_refused_before_use():
    with pytest.raises(PolicyError, match=r"seed=1\.5"):
        policy_of("random(seed=1.5)")


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("slots.positions.float()[..., :-1]", "shape"),
        ("slots.positions * float('nan')", "NaN"),
        ("slots.positions.fill_(0).float()", "positions"),
    ],
)
def test_a_file_is_checked_before_use(file: Path, body: str, says: str):
    file.write_text(FILE.replace("-slots.positions.float() * self.keep", body))
    with pytest.raises(PolicyError, match=says):
        policy_of(f"{file}:Oldest")


def test_a_name_is_a_policy_wherever_one_is_taken(file: Path, tmp_path: Path, attached_model: Models) -> None:
    model = attached_model("llama")
    specs = ["key_diff", "SnapKV(pool=7)", "pyramid(snapkv)", f"{file}:Oldest"]
    made = [KVCache(model, 30, policy=spec).policy for spec in specs]
    assert [repr(policy) for policy in made] == [
        "KeyDiff()",
        "SnapKV(observed_queries=32, pool=7, is_mean=False)",
        repr(Pyramid(SnapKV())),
        "Oldest(keep=3)",
    ]
    assert made[:3] == [CacheOptions(30, spec).policy for spec in specs[:3]] == [KeyDiff(), SnapKV(pool=7), made[2]]
    assert KVCache(model, 30, policy=made[0]).policy is made[0]
    path = tmp_path / "cache.safetensors"
    KVCache(model, 30, policy=specs[3]).save(path)
    assert repr(KVCache.load(path, model, policy=specs[3]).policy) == "Oldest(keep=3)"
    with pytest.raises(PromptCacheError, match=r"made with the policy Oldest\(keep=3\), not with KeyDiff\(\)"):
        KVCache.load(path, model, policy="key_diff")


@pytest.mark.usefixtures("any_type")
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (KeyDiff, "policy must be a policy or its name, got the class KeyDiff. Write policy=KeyDiff()"),
        (Pyramid, "policy must be a policy or its name, got the class Pyramid. Write policy=Pyramid(...)"),
        (7, 'policy must be a policy or its name, got 7. Write policy="key_diff" or windlass.policies.KeyDiff()'),
        ("key_dif", "policy 'key_dif' is unknown. Did you mean key_diff?"),
        ("SnapKV(pool=4)", "SnapKV: pool must be an odd number of at least 1, got 4"),
    ],
    ids=str,
)
def test_what_is_no_policy_is_refused_with_the_way_out(given: str, says: str, attached_model: Models) -> None:
    model = attached_model("llama")
    for take in (
        lambda: CacheOptions(policy=given),
        lambda: KVCache(model, policy=given),
        lambda: KVCache.load("nowhere.safetensors", model, policy=given),
    ):
        with pytest.raises(WindlassError, match=re.escape(says)):
            take()
