"""A model that is asked: it runs planned cases, up to so many texts side by side."""

from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import groupby

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.engine.text import encode
from windlass.evals.case import Case, Header
from windlass.evals.fit import Fitted, SampleSpec, fit, shortest
from windlass.evals.grid import Grid, Settings
from windlass.evals.measure import Outcome, answered, cache_of, predicted
from windlass.evals.planned import PlannedCase
from windlass.hf.fingerprint import fingerprint
from windlass.hf.kv_cache import KVCache
from windlass.hf.layer_shapes import LayerShape, layer_shapes
from windlass.hf.model_name import shown_name
from windlass.hf.trained_length import trained_length
from windlass.hf.weights import labelled, parameter_count
from windlass.policies.interfaces import OneShot
from windlass.policies.wrapper import find

FULL_TOKENS = 4096  # of texts that a full cache reads too, if a model does not tell how long those of its training were
POOL = 8  # texts per row of a batch, among which those of one budget are found


class Runner:
    """A model to ask, and the samples that were made last."""

    def __init__(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, seed: int) -> None:
        self._model, self._tokenizer, self._seed = model, tokenizer, seed
        self._shapes = layer_shapes(model)
        self._made: dict[tuple[str, int, int], Fitted] = {}
        self._pool: tuple[int, int] | None = None  # which texts those are

    def check(self, grid: Grid, samples: int, is_aware: bool) -> None:
        """Check every length on all texts, and every budget on the first of each task and length.

        Raises: UsageError for what cannot be honoured.
        """
        for label, task in grid.tasks.items():
            for length in grid.lengths:
                specs = [SampleSpec(task, label, length, self._seed, sample) for sample in range(samples)]
                for spec in specs:
                    shortest(spec, self._tokenizer)
                fitted = self._fitted(specs[0])
                if is_aware and not fitted.sample.turns:
                    raise UsageError(f"task {label} asks nothing, so it cannot be run --aware of a question")
                for settings in grid.settings:
                    self._check(settings, fitted, f"task {label} at length {length}")

    def batches(self, cases: Iterable[PlannedCase], batch: int) -> Iterator[list[PlannedCase]]:
        """`cases` in their order, but up to `batch` of them together, which can share a cache.

        Those have the same task, length and setting, and a budget that comes to as many slots, so that each is read
        as it would be alone. They are looked for among `POOL` times as many texts.
        """
        pool = 1 if batch == 1 else batch * POOL
        for number, texts in groupby(cases, lambda case: case.spec.number // pool):
            if (pool, number) != self._pool:
                self._made.clear()
                self._pool = pool, number
            groups: dict[tuple[object, ...], list[PlannedCase]] = {}
            for case in texts:
                key = case.spec.label, case.spec.length, *case.settings.labels.values(), *self._apart(case)
                groups.setdefault(key, []).append(case)
            for group in groups.values():
                yield from (group[start : start + batch] for start in range(0, len(group), batch))

    def measured(self, batch: Sequence[PlannedCase]) -> list[Case]:
        """Run cases that can share a cache; returns a case per question, text by text."""
        planned, fitted = batch[0], [self._fitted(case.spec) for case in batch]
        has_questions = bool(fitted[0].sample.turns)
        budget = planned.settings.budget.of(fitted[0].context_tokens)
        cache = cache_of(self._model, planned.settings, budget, has_questions, len(batch))
        if has_questions:
            task, label = planned.spec.task, planned.spec.label
            outcomes = answered(self._model, self._tokenizer, cache, label, task, fitted, planned.is_aware)
        else:
            outcomes = [[self._predicted(cache, each)] for each in fitted]
        return [
            self._case(case, text, budget, turn, outcome)
            for case, text, of_case in zip(batch, fitted, outcomes, strict=True)
            for turn, outcome in zip(case.turns, of_case, strict=True)
        ]

    def _case(
        self, planned: PlannedCase, fitted: Fitted, budget: int | None, number: int | None, outcome: Outcome
    ) -> Case:
        turn = outcome.turn
        return Case(
            **planned.settings.labels,
            task=planned.spec.label,
            is_aware=planned.is_aware,
            length=planned.spec.length,
            sample=planned.spec.number,
            budget=budget,
            context_tokens=fitted.context_tokens,
            bytes_full=bytes_full(self._shapes, fitted.context_tokens),
            turn=number,
            depth=None if turn is None else turn.depth,
            slots_held=outcome.slots_held,
            bytes_held=outcome.bytes_held,
            expected=() if turn is None else turn.expected,
            output=outcome.output,
            score=outcome.score,
            nll=outcome.measures.get("nll"),
            kl=outcome.measures.get("kl"),
            seconds=outcome.seconds,
            seed=planned.spec.seed,
        )

    def _apart(self, case: PlannedCase) -> tuple[object, ...]:
        """What cases of one batch must share beside their task, length and setting."""
        fitted, settings = self._fitted(case.spec), case.settings
        budget = settings.budget.of(fitted.context_tokens)
        # A text without questions is read alone; and where layers share a budget, all rows of a cache decide on it.
        one_shot = find(settings.options.policy, OneShot)
        is_shared = budget is not None and one_shot is not None and one_shot.shares_budget
        is_alone = not fitted.sample.turns or is_shared
        return budget, case.spec.number if is_alone else None

    def _predicted(self, cache: KVCache, fitted: Fitted) -> Outcome:
        """A text that is predicted, with a full cache beside it while the model was trained on texts as long."""
        ids = encode(self._tokenizer, fitted.sample.context, is_start=True)
        is_long = len(ids) > (trained_length(self._model.config.get_text_config()) or FULL_TOKENS)
        full = None if is_long else KVCache(self._model, chunk=cache.chunk)
        return predicted(self._model, cache, ids, full)

    def _fitted(self, spec: SampleSpec) -> Fitted:
        key = spec.label, spec.length, spec.number
        if key not in self._made:
            self._made[key] = fit(spec, self._tokenizer)
        return self._made[key]

    def _check(self, settings: Settings, fitted: Fitted, where: str) -> None:
        """Raises: UsageError, as the cache does, for a budget that it cannot have."""
        budget = settings.budget
        try:
            cache_of(self._model, settings, budget.of(fitted.context_tokens), True)
        except UsageError as error:
            of = f" of the {fitted.context_tokens} tokens of {where}" if budget.divisor is not None else ""
            raise UsageError(f"--budgets {budget.asked}{of}: {error}") from None


def bytes_full(shapes: Sequence[LayerShape], tokens: int) -> int:
    """Bytes of the keys and values of a text in a plain cache without budget."""
    per_token = ((shape, shape.kv_heads * shape.channels) for shape in shapes)
    return sum(min(tokens, shape.most_visible or tokens) * count * shape.dtype.itemsize for shape, count in per_token)


def header_of(name: str, seed: int, model: PreTrainedModel) -> Header:
    """What a file of results says of a run with this model, which was asked for by `name`."""
    return Header(
        windlass=version("windlass"),
        torch=version("torch"),
        transformers=version("transformers"),
        model=labelled(shown_name(name), model),
        parameters=parameter_count(model),
        dtype=str(model.dtype).removeprefix("torch."),
        trained_length=trained_length(model.config.get_text_config()),
        seed=seed,
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        fingerprint=fingerprint(model),
    )
