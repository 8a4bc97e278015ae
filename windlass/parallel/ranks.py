"""The processes that hold one model together, and the few things that they tell one another."""

from collections.abc import Mapping
from copy import copy
from typing import Any, TypeVar, final

import torch.distributed as dist
from torch import Tensor

Value = TypeVar("Value")


def is_lost(error: BaseException) -> bool:
    """Whether `error` is what PyTorch raises where another rank has died, or has not answered in time."""
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and "gloo" in str(error))


@final
class Ranks:
    """All processes of PyTorch's default process group: `size` of them, of which this one is `number`.

    Every method is a collective call: all ranks make it, in the same order, or each of them waits for the others until
    the group's timeout. What is of the host travels through a group of its own where the default one is of a device.

    Raises: RuntimeError from PyTorch, here and in all methods, where a rank has died or the timeout is over.
    """

    def __init__(self) -> None:
        self.number, self.size = dist.get_rank(), dist.get_world_size()
        self._host = dist.group.WORLD if dist.get_backend() == "gloo" else dist.new_group(backend="gloo")

    def __deepcopy__(self, memo: Mapping[int, object]) -> "Ranks":
        """Itself: processes can't be copied."""
        return self

    @property
    def is_first(self) -> bool:
        """Whether this is rank 0, which alone writes files and speaks."""
        return self.number == 0

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all ranks, a new tensor, the same bit by bit on each of them."""
        total = tensor.clone()
        dist.all_reduce(total, group=self._group(total))
        return total

    def of_first(self, tensor: Tensor) -> Tensor:
        """What `tensor` is on rank 0, of the same shape and dtype on all of them."""
        sent = tensor.contiguous().clone()
        dist.broadcast(sent, 0, group=self._group(sent))
        return sent

    def gathered(self, value: Value) -> list[Value]:
        """What `value`, which can be pickled, is on each rank, in their order."""
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self._host)
        return values

    def gathered_by_first(self, value: Value) -> list[Value]:
        """The same on rank 0; the others get nothing, an empty list."""
        values: list[Any] | None = [None] * self.size if self.is_first else None
        dist.gather_object(value, values, 0, group=self._host)
        return values or []

    def told_by_first(self, value: Value) -> Value:
        """What `value`, which can be pickled, is on rank 0."""
        values = [copy(value)]
        dist.broadcast_object_list(values, 0, group=self._host)
        return values[0]

    def _group(self, tensor: Tensor) -> Any:
        return self._host if tensor.device.type == "cpu" else dist.group.WORLD
