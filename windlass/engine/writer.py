"""What one request writes: a token out of the logits of its row, and the events that follow."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.engine.agreed import agreed_token
from windlass.engine.logprobs import logprobs_of
from windlass.engine.request import Logprob, Piece, Request
from windlass.engine.result import FinishReason
from windlass.engine.row import WrittenRow
from windlass.engine.sampler import Sampler, weakened
from windlass.engine.text import TextStream
from windlass.parallel.ranks import Ranks


class Writer:
    """Chooses the tokens of one request, by a generator of its own: they are the same in any batch.

    Of a model on several `ranks`, rank 0 chooses for all of them.
    """

    def __init__(
        self,
        request: Request,
        tokenizer: PreTrainedTokenizerBase,
        device: torch.device,
        ranks: Ranks | None = None,
    ) -> None:
        self.request, self._ranks = request, ranks
        # Its repetition penalty is part of the logits whose log probabilities are told: `_adjusted` has it.
        self._sampler = Sampler(replace(request.sampling, repetition_penalty=1.0), [request.prompt], device)
        self._row = WrittenRow(TextStream.after(tokenizer, request.prompt, request.stops), request.max_tokens)
        self._counts = Counter[int]()
        self._seen: Tensor | None = None  # (vocabulary,) bool: tokens of the prompt and the text, for the penalty

    @property
    def written(self) -> int:
        """Tokens so far."""
        return len(self._row.tokens)

    @property
    def reason(self) -> FinishReason:
        """Why the text has ended; "interrupted" while it goes on."""
        return self._row.reason

    @property
    def token(self) -> int:
        """The latest token."""
        return self._row.tokens[-1]

    def choose(self, logits: Tensor) -> Piece:
        """The next token, out of its (vocabulary,) logits.

        Raises: UsageError where the grammar allows no token.
        """
        logprobs: tuple[Logprob, ...] = ()

        def chosen() -> int:
            nonlocal logprobs
            scores = self._adjusted(logits.float())
            self._sampler.prepare()
            token = int(self._sampler.choose(scores[None]))
            if self._seen is not None:
                self._seen[token] = True
            if self.request.grammar is not None:
                self.request.grammar.accept(token)
            logprobs = self._logprobs(scores, token)
            return token

        token, offset = agreed_token(self._ranks, chosen), self._row.length
        self._counts[token] += 1
        return Piece(token, self._row.taken(self._row.step(token)), logprobs, offset)

    def _adjusted(self, scores: Tensor) -> Tensor:
        """With biases, then the repetition penalty, which counts the prompt, then the penalties that OpenAI defines,
        which do not, and the tokens alone that the grammar allows."""
        request, repetition = self.request, self.request.sampling.repetition_penalty
        scores = _added(scores, request.logit_bias)
        if repetition != 1.0:
            if self._seen is None:
                self._seen = torch.zeros_like(scores, dtype=torch.bool)
                self._seen[torch.tensor(request.prompt, device=scores.device)] = True
            scores = weakened(scores, self._seen, repetition)
        if request.presence_penalty or request.frequency_penalty:
            penalties = {
                token: -request.presence_penalty - count * request.frequency_penalty
                for token, count in self._counts.items()
            }
            scores = _added(scores, penalties)
        if request.grammar is not None:
            allowed = request.grammar.allowed().to(scores.device)
            if not bool(allowed.any()):
                raise UsageError(
                    "the grammar allows no token here; let the schema allow an end, or ask for another one"
                )
            scores = scores.masked_fill(~allowed[: len(scores)], -torch.inf)
        return scores

    def _logprobs(self, scores: Tensor, token: int) -> tuple[Logprob, ...]:
        if self.request.top_logprobs is None:
            return ()
        return logprobs_of(scores[None], [token], self.request.top_logprobs)[0]


def _added(scores: Tensor, numbers: Mapping[int, float]) -> Tensor:
    """Logits with a number more for some tokens."""
    if not numbers:
        return scores
    ids = torch.tensor(list(numbers), device=scores.device)
    return scores.index_add(0, ids, torch.tensor(list(numbers.values()), device=scores.device).float())
