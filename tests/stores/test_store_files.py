"""Low-bit caches in files and on the command line."""

from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

import windlass
from tests.helpers.models import Models, Text, read
from windlass import KVCache, UsageError
from windlass.cache.options import CacheOptions
from windlass.cli.options import LoadOptions
from windlass.cli.session import open_session
from windlass.hf.attach import attached
from windlass.policies import H2O, KeyDiff, Policy, Recent
from windlass.stores.formats import Plain


@pytest.fixture
def model(attached_model: Models) -> PreTrainedModel:
    return attached_model("llama")


@pytest.mark.parametrize("policy", [Recent(), KeyDiff(), H2O()], ids=repr)
@pytest.mark.parametrize("store", ["int8", "int4"])
def test_a_saved_cache_goes_on_as_if_never_interrupted(
    model: PreTrainedModel, text: Text, tmp_path: Path, store: str, policy: Policy
) -> None:
    ids = text(60, rows=2)
    cache = KVCache(model, budget=20, policy=policy, window=3, chunk=7, batch=2, store=store)
    windlass.prefill(model, cache, [ids[0, :40].tolist(), ids[1, :31].tolist()])
    cache.save(tmp_path / "file")
    again = KVCache.load(tmp_path / "file", model)
    assert again.store.name == store
    for mine, other in zip(again.layers, cache.layers, strict=True):
        orders = [layer.positions.sort(stable=True, descending=True).indices[..., :20] for layer in (mine, other)]
        packed = [layer.store.take(0, order[:1]) for layer, order in zip((mine, other), orders, strict=True)]
        for name, codes in packed[0].items():
            assert codes.equal(packed[1][name]), name
    theirs = read(model, cache, ids[:, 40:], 1)
    # Sums over slots in another order differ in their last bits, which may round a code the other way.
    torch.testing.assert_close(read(model, again, ids[:, 40:], 1), theirs, atol=2e-3, rtol=0)


def test_a_file_has_its_own_key_means(model: PreTrainedModel, text: Text, tmp_path: Path) -> None:
    seam = attached(model)
    KVCache(model, store="int4")  # measures them
    seam.key_means = [
        None if mean is None else mean + 1 for mean in seam.key_means or []
    ]  # differs from the measured means
    cache = KVCache(model, store="int4")
    read(model, cache, text(30), 30)
    cache.save(tmp_path / "file")
    theirs, seam.key_means = seam.key_means, None
    again = KVCache.load(tmp_path / "file", model)
    assert attached(model).key_means is None
    for layer, mean in zip(again.layers, theirs or [], strict=True):
        assert mean is not None
        assert layer.tensors()["key_centres"].equal(mean)
    again.splice(cache)
    for mine, other in zip(again.layers, cache.layers, strict=True):
        assert mine.tensors()["key_codes"][:, :, 30:60].equal(other.tensors()["key_codes"][:, :, :30])
    seam.key_means = None


def test_a_store_from_outside_cannot_be_saved(model: PreTrainedModel, text: Text, tmp_path: Path) -> None:
    class Own(Plain):
        def fresh(self, key_means: object) -> "Own":
            return Own()

    cache = KVCache(model, store=Own())
    read(model, cache, text(9), 9)
    with pytest.raises(UsageError, match=r"cannot be saved\. Use a KVCache with one of: plain, int8, int4"):
        cache.save(tmp_path / "file")


def test_from_rotated_and_back(model: PreTrainedModel, plain_model: Models, text: Text) -> None:
    with torch.no_grad():
        theirs = plain_model("llama")(text(20), use_cache=True).past_key_values
    cache = KVCache.from_rotated(model, theirs, CacheOptions(store="int8"))
    assert cache.layers[0].tensors()["key_codes"].dtype == torch.int8
    for ours, truth in zip(cache.to_rotated().layers, theirs.layers, strict=True):
        torch.testing.assert_close(ours.keys, truth.keys, atol=0.05, rtol=0)


def test_a_store_that_contradicts_a_file(tmp_path: Path, text: Text) -> None:
    folder = Path(__file__).parents[1] / "models" / "stories260K"
    options = {"store": "int4"}
    session = open_session(str(folder), options, LoadOptions("float32"))
    assert session.cache.store.name == "int4"
    windlass.prefill(session.model, session.cache, [text(9)[0].tolist()])
    session.cache.save(tmp_path / "file")
    again = open_session(str(folder), {}, LoadOptions("float32"), tmp_path / "file")
    assert again.cache.store.name == "int4"
    with pytest.raises(UsageError, match=r"--store int8 contradicts .*file, made with store int4. Leave it out"):
        open_session(str(folder), {"store": "int8"}, LoadOptions("float32"), tmp_path / "file")
    with pytest.raises(UsageError, match="'int5' is not a store"):
        open_session("nowhere", {"store": "int5"}, LoadOptions("float32"))
