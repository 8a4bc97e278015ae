"""The likeliest token, which is found by the bits of the logits: the same as by their values."""

import pytest
import torch

from windlass.engine.decode import likeliest

NUMBERS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
@pytest.mark.parametrize("shift", [0.0, 9.0, -9.0], ids=["mixed", "positive", "negative"])
def test_the_first_of_the_highest_is_chosen(dtype: torch.dtype, shift: float) -> None:
    logits = torch.randn(7, 1031, generator=torch.Generator().manual_seed(5)).mul(2).add(shift).to(dtype)
    logits[:, 500:] = logits[:, :531].flip(-1)  # each is there twice
    found = likeliest(logits)
    for row in range(7):
        values = logits[row].tolist()
        assert found[row].tolist() == [values.index(max(values))]


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_hidden_tokens_zeros_and_columns_of_a_wider_tensor(dtype: torch.dtype) -> None:
    inf = float("inf")
    wide = torch.tensor([[-inf, -0.0, 0.0, -2.0], [-inf, -inf, -3.0, -3.0], [inf, 1.0, inf, -1.0]], dtype=dtype)
    assert likeliest(wide).tolist() == [[1], [2], [0]]
    assert likeliest(wide[:, 1:]).tolist() == [[0], [1], [1]]
    assert likeliest(wide.T.contiguous().T).tolist() == [[1], [2], [0]]
