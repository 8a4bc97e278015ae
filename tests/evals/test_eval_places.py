"""Where in a text an answer stands: at a depth that is asked for, or spread over a long novel."""

import random
import re

import pytest

from windlass.core.errors import UsageError
from windlass.evals.grid import ListOptions, grid_of
from windlass.evals.tasks import NAMES

NEEDLE = re.compile(r"One of the special magic numbers for ([\w-]+) is: (\d+)\.")
PLACED = [name for name in NAMES if NAMES[name].at(0.5) is not None]


def test_tasks_that_hide_one_answer_can_set_its_place():
    assert [
        *("passkey", "passkey_words", "passkey_novel", "passkey_words_novel"),
        *("niah_single", "niah_single_2", "niah_single_3", "niah_multikey", "niah_multikey_2", "niah_multikey_3"),
        *("magic_single", "magic_single_noise", "magic_multikey", "magic_multikey_2"),
    ] == PLACED


@pytest.mark.parametrize("depth", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", PLACED)
def test_an_answer_stands_at_the_depth_that_is_asked_for(name: str, depth: float):
    task = NAMES[name].at(depth)
    assert task is not None
    for seed in range(3):
        sample, free = (each.compose(random.Random(seed), 1500, 900) for each in (task, NAMES[name]))
        (turn,) = sample.turns
        assert turn.expected == free.turns[0].expected  # the same text, but for the place
        assert turn.depth == pytest.approx(depth, abs=0.05)
        place = sample.context.index(turn.expected[0]) / len(sample.context)
        assert place == pytest.approx(depth, abs=0.1)


def test_depths_make_a_task_each():
    grid = grid_of(ListOptions("passkey,niah_multikey", "80", {}, "0,0.25,0.250,1"))
    names = ["passkey", "niah_multikey"]
    assert list(grid.tasks) == [f"{name}@{depth}" for name in names for depth in ("0", "0.25", "1")]
    assert list(grid.tasks.values()) == [NAMES[name].at(depth) for name in names for depth in (0.0, 0.25, 1.0)]
    assert grid_of(ListOptions("passkey", "80", {})).tasks == {"passkey": NAMES["passkey"]}


@pytest.mark.parametrize(
    ("tasks", "depths", "says"),
    [
        ("passkey", "0.5,1.01", "--depth '1.01' is not a part of the text. Write 0 for its start"),
        ("passkey", "-0", "--depth '-0' is not a part of the text"),
        ("passkey", "0,", "--depth '0,' has an empty value"),
        ("passkey,vt", "0.5", "task vt has no single place for its answer. Leave out --depth"),
        ("facts", "0", "task facts has no single place for its answer"),
        ("niah_multivalue", "0", "task niah_multivalue has no single place for its answer"),
        ("niah_multiquery", "0", "task niah_multiquery has no single place for its answer"),
    ],
)
def test_a_place_that_cannot_be_is_told(tasks: str, depths: str, says: str):
    with pytest.raises(UsageError) as caught:
        grid_of(ListOptions(tasks, "80", {}, depths))
    assert says in str(caught.value)


def test_forty_facts_are_spread_over_a_novel_that_keeps_its_digits():
    sample = NAMES["facts"].compose(random.Random(4), 60_000, 30_000)
    found = list(NEEDLE.finditer(sample.context))
    assert len({each[1] for each in found}) == len(found) == len(sample.turns) == 40
    places = [each.start() / len(sample.context) for each in found]
    assert places == pytest.approx([number / 39 for number in range(40)], abs=0.01)
    told = {each[1]: each[2] for each in found}
    for turn in sample.turns:
        (key,) = re.findall(r" for ([\w-]+) is:", turn.prefix)
        assert turn.expected == (told.pop(key),)
    assert re.search(r"\d", NEEDLE.sub("", sample.context))
    spelled = NAMES["magic_multiturn"].compose(random.Random(4), 60_000, 30_000)
    assert not re.search(r"\d", NEEDLE.sub("", spelled.context))
