"""Parts of `python -m gpu`: whole decode steps of Windlass, as `windlass bench` times them. Rows take turns."""

import copy
import functools
import itertools
from dataclasses import replace

import torch
from transformers import PreTrainedModel

from gpu.part import Part
from windlass import attach
from windlass.evals.speed.measure import Timer, cache_bytes, check_memory, free_bytes, gpu_name
from windlass.evals.speed.rows import SHAPES, random_model, rows_of
from windlass.evals.speed.table import Conditions, as_json
from windlass.evals.speed.workloads import BenchLists
from windlass.hf.forward import layer_shapes

POLICIES = "recent,h2o,snapkv,tova,key_diff"
STORES = "plain,int8,int4"


def measure(part: Part, shape: str) -> None:
    """The cost of un-rotated storage at every depth, then policies and stores at the budget."""
    sizes = part.sizes
    models = {"as it is": attach(random_model(SHAPES[shape], torch.bfloat16, part.device))}
    groups: list[tuple[str, BenchLists]] = []
    for graph, batch in itertools.product(part.graphs, map(str, sizes.batches)):
        base = BenchLists("0", str(sizes.tokens), graph=graph)
        for depth in map(str, sizes.depths):
            groups.append(("storage", replace(base, depth=depth, batch=batch, storage="rotated,unrotated")))
        at, budget = replace(base, depth=str(sizes.policy_depth), batch=batch), {"budget": str(sizes.budget)}
        groups.append(("policies", replace(at, options=budget | {"policy": POLICIES})))
        groups.append(("stores", replace(at, options=budget | {"store": STORES})))
    for index, (name, lists) in enumerate(groups):
        _attempt(part, name, shape, models, lists, 1 / (len(groups) - index))


def compiled(part: Part, shape: str) -> None:
    """The same step by the model as it is, and by one whose norms and MLPs went through `torch.compile`.

    Not the whole model: what a cache remembers between steps is Python, which would be traced anew at each.
    """
    model, twin = (attach(each) for each in pair(shape, part.device))
    decoder = twin.get_decoder()
    modules = [decoder.norm]
    for layer in decoder.layers:
        modules += [layer.input_layernorm, layer.post_attention_layernorm, layer.mlp]
    for module in modules:
        module.compile(backend=part.compiler)
    sizes = part.sizes
    for index, batch in enumerate(sizes.batches):
        lists = BenchLists(
            "0",
            str(sizes.tokens),
            str(sizes.policy_depth),
            {"budget": str(sizes.budget)},
            batch=str(batch),
            graph=part.graphs[0],
        )
        models = {"as it is": model, "norms and MLPs compiled": twin}
        _attempt(part, "compiled", shape, models, lists, 1 / (len(sizes.batches) - index))


def pair(shape: str, device: torch.device) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Two models that share their random weights, neither attached."""
    model = random_model(SHAPES[shape], torch.bfloat16, device)
    return model, copy.deepcopy(model, {id(each): each for each in model.parameters()})


def _attempt(
    part: Part, name: str, shape: str, models: dict[str, PreTrainedModel], lists: BenchLists, share: float
) -> None:
    budget = lists.options.get("budget", "all")
    what = f"{name} of {shape}, batch {lists.batch}, depth {lists.depth}, budget {budget}, graph {lists.graph}"
    part.attempt(what, functools.partial(_measure, part, name, shape, models, lists, share))


def _measure(
    part: Part, name: str, shape: str, models: dict[str, PreTrainedModel], lists: BenchLists, share: float
) -> None:
    """One group: every row of `lists` by every model, in turn, with a line for each."""
    chunk, shapes = part.sizes.chunk, layer_shapes(next(iter(models.values())))
    rows = [(way, row) for way in models for row in rows_of(lists, chunk)]
    check_memory(0, cache_bytes(shapes, [row for _, row in rows]), free_bytes(part.device))
    timers = [Timer(models[way], shapes, row) for way, row in rows]
    samples, step_bytes = part.take_turns(timers, share)
    parameters = list(models[rows[0][0]].parameters())
    numbers, size = sum(each.numel() for each in parameters), sum(each.nbytes for each in parameters)
    about = Conditions(shape, size, numbers, "bfloat16", chunk, len(samples[0]), gpu=gpu_name(part.device))
    for (way, row), timer, samples_s, most in zip(rows, timers, samples, step_bytes, strict=True):
        row.samples_s[:] = samples_s
        memory = {"bytes_held": timer.cache.bytes_held, "step_bytes": most}
        part.write("decode", group=name, way=way, **as_json(row, about), **memory)
