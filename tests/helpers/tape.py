"""A graph of PyTorch's operations on the CPU, which behaves as one of CUDA does.

Recorded operations run again on the memory of the recording, with results in the memory of the first results. Recording
itself changes nothing. Operations that would make the host wait for a device, or send it something, are refused.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from windlass.engine.decode import Graph

SYNCS = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "equal", "is_nonzero", "item")

Operation = tuple[Any, tuple[Any, ...], dict[str, Any], Any]


class Tape(Graph):
    """Counts how often it was `captured` and `replayed`."""

    def __init__(self) -> None:
        self.captured = self.replayed = 0
        self._operations: list[Operation] = []

    def capture(self, work: Callable[[], None]) -> None:
        recorder = Recorder()
        try:
            with pytest.MonkeyPatch.context() as patch, recorder:
                for owner, name in ((torch, "tensor"), (Tensor, "tolist"), (Tensor, "numpy"), (Tensor, "cpu")):
                    patch.setattr(owner, name, refuse(name))
                work()
        finally:
            recorder.restore()
        self._operations = recorder.operations
        self.captured += 1

    def replay(self) -> None:
        for function, args, kwargs, results in self._operations:
            again = function(*args, **kwargs)  # of PyTorch, as they were recorded
            for old, new in zip(tree_leaves(results), tree_leaves(again), strict=True):
                if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                    assert old.shape == new.shape, f"the shape of a result of {function} changes"
                    old.copy_(new)
        self.replayed += 1

    def copied(self, ids: Tensor) -> Callable[[], list[int]]:
        host = ids.clone()
        return lambda: host[:, 0].tolist()


class Recorder(TorchDispatchMode):
    """Keeps every operation, and the former contents of its output memory."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Operation] = []
        self._before: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}

    def __torch_dispatch__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(function.overloadpacket.__name__ == name for name in SYNCS):
            raise RuntimeError(f"operation not permitted when a stream is capturing: {function}")
        given = [*args, *(None for _ in function._schema.arguments[len(args) :])]
        for argument, value in zip(function._schema.arguments, given, strict=True):
            value = kwargs.get(argument.name, value)
            if argument.alias_info is not None and argument.alias_info.is_write and isinstance(value, Tensor):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self._before:
                    self._before[storage.data_ptr()] = storage, storage.clone()
        results = function(*args, **kwargs)  # of any operation of PyTorch
        self.operations.append((function, args, kwargs, results))
        return results

    def restore(self) -> None:
        """Restore the former contents."""
        for storage, before in self._before.values():
            storage.copy_(before)


def refuse(name: str) -> Callable[..., Any]:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError(f"operation not permitted when a stream is capturing: {name}")

    return fail
