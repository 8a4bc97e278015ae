"""What one request writes: a token out of the logits of its row, and the events that follow."""

from collections import Counter

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from windlass.core.errors import UsageError
from windlass.engine.agreed import agreed_token
from windlass.engine.request import Logprob, Piece, Request
from windlass.engine.result import FinishReason
from windlass.engine.row import WrittenRow
from windlass.engine.sampler import Sampler
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
        self._sampler = Sampler(request.sampling, [request.prompt], device)
        self._row = WrittenRow(TextStream.after(tokenizer, request.prompt, request.stops), request.max_tokens)
        self._counts = Counter[int]()

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
            if self.request.grammar is not None:
                self.request.grammar.accept(token)
            logprobs = self._logprobs(scores, token)
            return token

        token = agreed_token(self._ranks, chosen)
        self._counts[token] += 1
        return Piece(token, self._row.taken(self._row.step(token)), logprobs)

    def _adjusted(self, scores: Tensor) -> Tensor:
        """Penalties as OpenAI defines them: of what the text has written, not of its prompt."""
        request = self.request
        biases = dict(request.logit_bias)
        if request.presence_penalty or request.frequency_penalty:
            for token, count in self._counts.items():
                penalty = request.presence_penalty + count * request.frequency_penalty
                biases[token] = biases.get(token, 0.0) - penalty
        if biases:
            ids = torch.tensor(list(biases), device=scores.device)
            scores = scores.index_add(0, ids, torch.tensor(list(biases.values()), device=scores.device).float())
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
        values = scores.log_softmax(-1)
        best = values.topk(self.request.top_logprobs)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return Logprob(token, float(values[token])), *(Logprob(*pair) for pair in pairs)
