"""A recall store whose tokens are ranked by a device, of which nothing can be asked: PyTorch's "meta" stands for it."""

from dataclasses import dataclass, field

import pytest
import torch
from torch import Tensor

from windlass import kernels
from windlass.cache.recall import RecallMemory, RecallStore
from windlass.core.inputs import PageInput, ReadInput, WriteInput
from windlass.kernels.triton import recall, slots
from windlass.stores.formats import store_of

pytest.importorskip("triton", reason="Triton is not installed")


@dataclass
class Moves:
    """Stands for the kernels: notes which of their tensors lie where, and computes nothing."""

    made: set[tuple[str, str]] = field(default_factory=set)

    def read_tokens(self, call: ReadInput) -> Tensor:
        self.made |= {("read", piece.device.type) for piece in call.pieces}
        assert call.index.device.type == "meta"
        return call.pieces[0].new_empty(*call.index.shape, call.pieces[0].shape[3], device="meta")

    def write_tokens(self, call: WriteInput) -> None:
        self.made |= {("write", piece.device.type) for piece in call.pieces}
        assert call.index.device.type == call.rows.device.type == "meta"

    def allowed(self, queries: Tensor, call: PageInput, pages: int) -> Tensor:
        self.made |= {("rank", part.tiles.device.type) for each in call.digests for part in (each.largest, each.least)}
        return torch.empty(*queries.shape[:4], pages, device=queries.device)

    def encode(self, states: Tensor, means: Tensor | None, group: int) -> tuple[Tensor, Tensor]:
        assert means is None or means.device == states.device
        shape, width = states.shape[:3], states.shape[3]
        held, dtype = (width // 2, torch.uint8) if group else (width, torch.int8)
        numbers = 2 * -(-width // group) if group else 1
        return states.new_empty(*shape, held, dtype=dtype), states.new_empty(*shape, numbers, dtype=torch.float16)


@pytest.fixture
def moves(monkeypatch: pytest.MonkeyPatch) -> Moves:
    made = Moves()
    monkeypatch.setattr(kernels, "_has_triton", lambda device: device == "meta")
    monkeypatch.setattr(recall, "read_tokens", made.read_tokens)
    monkeypatch.setattr(recall, "write_tokens", made.write_tokens)
    monkeypatch.setattr(recall, "_allowed", made.allowed)
    monkeypatch.setattr(slots, "encode", made.encode)
    return made


@pytest.mark.parametrize("name", ["plain", "int8", "int4"])
def test_tokens_are_written_and_chosen_without_a_question(name: str, moves: Moves) -> None:
    means = None if name == "plain" else torch.zeros(3, 8, device="meta")
    store = RecallStore(16, store_of(name).fresh(means), RecallMemory(None))
    positions = torch.arange(40, device="meta").expand(2, -1)
    for _ in range(80):
        keys, values = (torch.empty(2, 3, 40, width, device="meta", dtype=torch.bfloat16) for width in (8, 10))
        index = store.append(keys, values, positions, (40, 37))
        assert (index.device.type, index.shape) == ("meta", (2, 1, 40))
    assert store.lengths == (3200, 2960)
    found = store.choose(
        torch.empty(2, 6, 1, 8, device="meta"),
        torch.ones(2, 1, dtype=torch.bool, device="meta"),
        torch.zeros(2, 3, 20, device="meta"),
    )
    assert {part.device.type for part in (*found.parts.values(), found.positions)} == {"meta"}
    assert found.positions.shape == (2, 3, 16)
    assert moves.made == {("read", "cpu"), ("write", "cpu"), ("write", "meta"), ("rank", "meta")}
    places = {tensor.device.type for tensor in store.allocated()}
    assert places == {"cpu", "meta"}


def test_what_its_kernels_do_not_know_is_ranked_by_the_host(moves: Moves) -> None:
    assert kernels.recall_device(torch.device("meta"), torch.bfloat16).type == "meta"
    assert kernels.recall_device(torch.device("meta"), torch.float64).type == "cpu"
    assert kernels.recall_device(torch.device("mps"), torch.bfloat16).type == "cpu"
    assert moves.made == set()
