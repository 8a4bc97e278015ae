"""A part of `python -m gpu`: the most memory above the weights while a prompt is read, in chunks and at once."""

import functools

import torch
from transformers import DynamicCache, PreTrainedModel

import windlass
from gpu.decode import pair
from gpu.part import Part, Work
from windlass.engine.generate import prefill


def measure(part: Part) -> None:
    """Every shape: Windlass with and without a budget, and transformers as its `generate` reads a prompt."""
    tokens, budget = part.sizes.prompt, part.sizes.budget
    for shape in part.sizes.shapes:
        plain, ours = pair(shape, part.device)
        windlass.attach(ours)
        ids = torch.randint(plain.config.vocab_size, (1, tokens), generator=torch.Generator().manual_seed(0))
        ways: dict[str, Work] = {
            "windlass, budget all": functools.partial(_in_chunks, part, ours, ids, None),
            f"windlass, budget {budget}": functools.partial(_in_chunks, part, ours, ids, budget),
            "transformers dynamic, at once": functools.partial(_at_once, plain, ids.to(part.device)),
        }
        for name, way in ways.items():
            part.attempt(f"memory of {shape}, {name}", functools.partial(_measure, part, shape, name, way))


def _measure(part: Part, shape: str, name: str, way: Work) -> None:
    most = None
    if part.is_gpu:
        torch.cuda.reset_peak_memory_stats(part.device)
        held = torch.cuda.memory_allocated(part.device)
    seconds = part.seconds(way)
    if part.is_gpu:
        most = torch.cuda.max_memory_allocated(part.device) - held
    part.write("memory", shape=shape, prompt_tokens=part.sizes.prompt, way=name, bytes=most, first_run_s=seconds)


def _in_chunks(part: Part, model: PreTrainedModel, ids: torch.Tensor, budget: int | None) -> None:
    cache = windlass.KVCache(
        model, budget=budget, policy=windlass.policies.Recent(), positions="original", chunk=part.sizes.chunk
    )
    prefill(model, cache, ids.tolist())


def _at_once(model: PreTrainedModel, ids: torch.Tensor) -> None:
    model(input_ids=ids, past_key_values=DynamicCache(config=model.config), logits_to_keep=1)
