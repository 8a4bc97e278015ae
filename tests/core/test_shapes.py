"""Shapes are checked while the tests run."""

import jaxtyping
import pytest
import torch

from tests.helpers.checked import of_shapes
from windlass.cache.recall import RecallStore
from windlass.kernels import reference


def test_a_wrong_shape_is_refused() -> None:
    with pytest.raises(jaxtyping.TypeCheckError):
        reference.first_free(torch.zeros(3, 5, dtype=torch.int32), 2)


def test_what_names_no_shape_is_left_as_it_is() -> None:
    def none(count: int, text: str) -> int:
        return count + len(text)

    assert of_shapes(none, typechecker=None) is none
    # Annotations that are strings, too.
    assert "jaxtyping" in RecallStore.append.__code__.co_filename
    assert "jaxtyping" not in RecallStore.make_room.__code__.co_filename
