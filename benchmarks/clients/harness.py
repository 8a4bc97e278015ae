"""lm-evaluation-harness, offline, on tasks of this file: the answers of a plain and of an attached model."""

import json
import tempfile
from pathlib import Path
from typing import Any

from clients.compare import BUDGET, MODEL, Compared, plain_model
from lm_eval import simple_evaluate
from lm_eval.models.huggingface import HFLM
from lm_eval.tasks import TaskManager
from torch import Tensor
from transformers import AutoTokenizer

import windlass
from windlass import KVCache

TEXTS = (
    "There were four of us, George, and William Samuel Harris, and myself, and",
    "We were sitting in my room, smoking, and talking about how bad we were",
    "The sea",
    "It is a most extraordinary thing, but I never read a patent medicine advertisement without",
    "I remember going to the British Museum one day to read up the treatment for some slight ailment. I got down",
    "George said he felt",
)
CHOICES = (" the river", " a tin of pineapple", " nothing at all")


class CachedLM(HFLM):  # type: ignore[misc]
    """The harness' own model, which generates into a `KVCache`."""

    def __init__(self, budget: int | None, **options: Any) -> None:
        super().__init__(**options)
        self.budget = budget

    def _model_generate(self, context: Tensor, max_length: int, stop: list[str], **options: Any) -> Tensor:
        cache = KVCache(self.model, self.budget, policy=windlass.policies.Recent(), batch=context.shape[0])
        written: Tensor = super()._model_generate(context, max_length, stop, past_key_values=cache, **options)
        return written


def answers_equal(rows: int, has_cache: bool) -> Compared:
    """Return True if all answers are those of the plain model, with a cache in few slots."""
    theirs = _answers(HFLM(pretrained=plain_model(), tokenizer=_tokenizer(), batch_size=rows))
    model = windlass.attach(plain_model())
    options: dict[str, Any] = {"pretrained": model, "tokenizer": _tokenizer(), "batch_size": rows}
    if not has_cache:
        return Compared(None, _answers(HFLM(**options)) == theirs, True)
    ours = _answers(CachedLM(None, **options))
    few = _answers(CachedLM(BUDGET, **options))
    return Compared(None, ours == theirs, len(few) == len(theirs))


def _tokenizer() -> Any:
    tokenizer = AutoTokenizer.from_pretrained(MODEL)
    if tokenizer.pad_token is None:
        tokenizer.pad_token = tokenizer.eos_token or tokenizer.convert_ids_to_tokens(0)
    return tokenizer


def _answers(model: Any) -> dict[str, list[object]]:
    """By task, what the model wrote or chose for each text."""
    with tempfile.TemporaryDirectory() as folder:
        data = Path(folder) / "texts.jsonl"
        data.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
        shared: dict[str, Any] = {
            "dataset_path": "json",
            "dataset_kwargs": {"data_files": {"test": str(data)}, "cache_dir": folder},
            "test_split": "test",
            "doc_to_text": "{{text}}",
        }
        writes = {**shared, "task": "windlass_writes", "output_type": "generate_until", "doc_to_target": ""}
        writes |= {"generation_kwargs": {"until": ["\n\n"], "max_gen_toks": 24, "do_sample": False}}
        writes |= {"metric_list": [{"metric": "exact_match"}]}
        chooses = {**shared, "task": "windlass_chooses", "output_type": "multiple_choice", "doc_to_target": 0}
        chooses |= {"doc_to_choice": list(CHOICES), "metric_list": [{"metric": "acc"}]}
        tasks: Any = [writes, chooses]
        found = simple_evaluate(model, tasks=tasks, task_manager=TaskManager(), bootstrap_iters=0, log_samples=True)
    return {
        task: [_rounded(sample["filtered_resps"]) for sample in sorted(samples, key=lambda each: each["doc_id"])]
        for task, samples in found["samples"].items()
    }


def _rounded(answers: Any) -> object:
    """Return texts unchanged, and the likelihood of each choice within rounding."""
    return [each if isinstance(each, str) else (round(float(each[0]), 3), str(each[1])) for each in answers]
