"""Text written with drafts of the model's own first layers, against text written token by token, over budget.

    python benchmarks/speculative.py >> benchmarks/results/speculative.jsonl
    python benchmarks/speculative.py --shape 1b --policy recent --tokens 48 >> benchmarks/results/speculative.jsonl

The model that is shipped, in float32, behind a piece of a novel. With `--shape` a model of random weights in bfloat16
of which only the first layers change anything, so that every draft is right: the most that drafts can gain. The draft
is a plain model of transformers that shares its first layers, norm and head; assisted decoding of transformers drives
both. With and without take turns, each with a new cache. Prints one JSON line per policy and number of drafts: tokens
per second, the prompt's time included, the quartiles of the ratio, and how many tokens differ from greedy's, which
have to be none.
"""

import argparse
import copy
import json
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from machine import machine
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel
from turns import in_turn, quartiles

import windlass
from windlass.evals.speed.rows import random_model, shape_of
from windlass.evals.texts import novel
from windlass.kernels import cpu

FOLDER = Path(windlass.__file__).parent / "assets" / "finder-3m"


def plain_model(shape: str | None) -> PreTrainedModel:
    """The shipped model, or a random one of this shape."""
    if shape is not None:
        return random_model(shape_of(shape, None)[0], torch.bfloat16)
    shipped: PreTrainedModel = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32).eval()
    return shipped


def silence(model: PreTrainedModel, layers: int) -> None:
    """Let the layers after the first `layers` change nothing; they take their time all the same."""
    for layer in model.get_decoder().layers[layers:]:
        layer.self_attn.o_proj.weight.data.zero_()
        layer.mlp.down_proj.weight.data.zero_()


def draft_of(whole: PreTrainedModel, layers: int, drafts: int) -> PreTrainedModel:
    """The first layers of a model, with its own weights, which give `drafts` tokens at a time."""
    model: Any = copy.deepcopy(whole, {id(each): each for each in whole.parameters()})
    model.model.layers = model.model.layers[:layers]
    model.config.num_hidden_layers = layers
    model.generation_config.num_assistant_tokens = drafts
    model.generation_config.num_assistant_tokens_schedule = "constant"
    model.generation_config.assistant_confidence_threshold = 0.0
    drafting: PreTrainedModel = model
    return drafting


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shape", help="random weights of this shape, in place of the shipped model")
    parser.add_argument("--layers", type=int, default=2, help="of the draft")
    parser.add_argument("--drafts", type=int, nargs="+", default=[4, 15], help="tokens of a draft")
    parser.add_argument("--budget", type=int, default=128)
    parser.add_argument("--prompt", type=int, default=400)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--policy", default="recent,snapkv,h2o")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    plain = plain_model(options.shape)
    drafting = {drafts: draft_of(plain, options.layers, drafts) for drafts in options.drafts}
    model: Any = windlass.attach(plain)
    if options.shape is not None:
        silence(plain, options.layers)
    tokenizer = AutoTokenizer.from_pretrained(FOLDER)
    ids = tokenizer(novel()[5000:9000], return_tensors="pt").input_ids[:, : options.prompt]
    run: dict[str, Any] = {"max_new_tokens": options.tokens, "min_new_tokens": options.tokens, "do_sample": False}
    written: dict[str, list[int]] = {}

    def writer(name: str, policy: str, more: dict[str, Any]) -> Callable[[], None]:
        def work() -> None:
            cache = windlass.KVCache(model, options.budget, policy)
            out = model.generate(ids, past_key_values=cache, pad_token_id=0, **run, **more)
            written[name] = out[0, ids.shape[1] :].tolist()

        return work

    for policy in options.policy.split(","):
        for drafts in options.drafts:
            works = {"greedy": writer("greedy", policy, {})}
            works["drafts"] = writer("drafts", policy, {"assistant_model": drafting[drafts]})
            seconds = in_turn(works, options.rounds)
            line: dict[str, Any] = {"kind": "speculative", **machine(options.threads), "kernel": cpu.instruction_set()}
            line |= {"shape": options.shape}
            line |= {"draft_layers": options.layers, "layers": model.config.num_hidden_layers, "drafts": drafts}
            line |= {"prompt": options.prompt, "budget": options.budget, "policy": policy, "tokens": options.tokens}
            rates = {name: options.tokens / statistics.median(each) for name, each in seconds.items()}
            differing = sum(a != b for a, b in zip(written["greedy"], written["drafts"], strict=True))
            line |= {"rounds": options.rounds, "tokens_per_s": rates, "differing": differing}
            print(json.dumps(line | {"ratios": quartiles(seconds["greedy"], seconds["drafts"])}), flush=True)


if __name__ == "__main__":
    main()
