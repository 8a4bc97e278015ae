"""The training itself: a model, its two optimizers, and the steps that they have done."""

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from training.muon import Muon
from training.rows import Rows
from windlass.core.errors import UsageError

MOMENTUM, BETAS, DECAY = 0.95, (0.9, 0.95), 0.01
LEAST_RATE = 0.02
CLIP = 1.0
CHECKED = 16  # texts of a lesson in a check


@dataclass(frozen=True)
class Schedule:
    """What every step is: its context, its lessons, and its rate, up in `warm_up` steps, down in the last `decay`."""

    contexts: list[int]
    mixes: list[dict[str, float]]
    warm_up: int
    decay: int

    def rate(self, step: int) -> float:
        """0 to 1, by which both learning rates are multiplied."""
        left = len(self.contexts) - step
        return min((step + 1) / max(self.warm_up, 1), 1.0, max(LEAST_RATE, left / max(self.decay, 1)))

    def until(self, step: int) -> list[tuple[int, dict[str, float], float]]:
        """The context, the lessons and the rate of all steps before this one."""
        return [
            (self.contexts[each], self.mixes[each], self.rate(each)) for each in range(min(step, len(self.contexts)))
        ]


class Learner:
    """Changes the weights of `model`, step by step.

    Source: Muon, Jordan 2024 (kellerjordan.github.io/posts/muon), torch's or, in float32, ours, for the matrices;
    AdamW, Loshchilov and Hutter 2017 (arXiv:1711.05101), for embeddings and norms.
    """

    def __init__(
        self, model: PreTrainedModel, schedule: Schedule, muon_rate: float, adam_rate: float, precision: torch.dtype
    ) -> None:
        self.model, self.schedule, self.precision, self.done = model, schedule, precision, 0
        embeddings = {id(part.weight) for part in model.modules() if isinstance(part, nn.Embedding)}
        embeddings.add(id(model.get_output_embeddings().weight))
        matrices = [each for each in model.parameters() if each.ndim == 2 and id(each) not in embeddings]
        others = [each for each in model.parameters() if each.ndim != 2 or id(each) in embeddings]
        muon = Muon if precision is torch.float32 else torch.optim.Muon
        self._optimizers = (
            (muon(matrices, lr=muon_rate, momentum=MOMENTUM, weight_decay=DECAY), muon_rate),
            (torch.optim.AdamW(others, lr=adam_rate, betas=BETAS, weight_decay=0.0), adam_rate),
        )

    def step(self, tokens: Tensor, weights: Tensor) -> float:
        """Learn from one batch; returns its loss before that."""
        scale = self.schedule.rate(self.done)
        loss = loss_of(self.model, tokens, weights, self.precision)
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        for optimizer, peak in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = peak * scale
            optimizer.step()
            optimizer.zero_grad()
        self.done += 1
        return loss.item()

    def save(self, path: Path, made_with: dict[str, str]) -> None:
        """Write all that going on takes, whole or not at all."""
        state = {
            "made_with": made_with,
            "schedule": self.schedule.until(self.done),
            "model": self.model.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer, _ in self._optimizers],
        }
        part = path.with_suffix(".part")
        torch.save(state, part)
        part.replace(path)

    def resume(self, path: Path, made_with: dict[str, str]) -> None:
        """Be as the learner was that wrote the file.

        Raises: UsageError where the file is damaged, or these settings would not have come to it.
        """
        try:
            state = torch.load(path, map_location=self.model.device)
            found, schedule = state["made_with"], state["schedule"]
        except Exception as error:
            raise UsageError(f"checkpoint {path} cannot be read; move it away to start anew") from error
        for name, value in made_with.items():
            if found.get(name) != value:
                raise UsageError(
                    f"checkpoint {path} was made with {name} {found.get(name)}, not {value}; give the same, or "
                    "another folder"
                )
        if schedule != self.schedule.until(len(schedule)):
            raise UsageError(
                f"checkpoint {path} has done {len(schedule)} steps of other contexts, lessons or rates; give steps "
                "that begin alike, or another folder"
            )
        self.model.load_state_dict(state["model"])
        for (optimizer, _), saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.done = len(schedule)


def _computing(tokens: Tensor, precision: torch.dtype) -> torch.autocast:
    """Products in this precision; in float32, as the weights are."""
    return torch.autocast(tokens.device.type, torch.bfloat16, enabled=precision is torch.bfloat16)


def loss_of(model: PreTrainedModel, tokens: Tensor, weights: Tensor, precision: torch.dtype) -> Tensor:
    """The mean cross-entropy of the tokens but the first, by weight; those without any are not predicted."""
    targets, weights = tokens[:, 1:], weights[:, 1:]
    is_learnt = weights > 0
    with _computing(tokens, precision):
        hidden = model.get_decoder()(tokens[:, :-1], use_cache=False).last_hidden_state
        logits = model.get_output_embeddings()(hidden[is_learnt])
    losses = functional.cross_entropy(logits.float(), targets[is_learnt], reduction="none")
    return (losses * weights[is_learnt]).sum() / weights[is_learnt].sum()


@torch.no_grad()
def check(model: PreTrainedModel, rows: Rows, context: int, precision: torch.dtype) -> dict[str, float]:
    """By lesson of the mix: the share of answers that are right in every token, given the tokens before.

    The texts are the same at every check, and none that is learnt from.
    """
    shares = {}
    for name in rows.mix:
        made = [rows.row(f"check {number}", context + 1, name) for number in range(CHECKED)]
        tokens = torch.tensor([row.tokens for row in made], device=model.device)
        with _computing(tokens, precision):
            said = model(tokens[:, :-1], use_cache=False).logits.argmax(-1)
        is_right = (said == tokens[:, 1:]).tolist()
        answers = [
            all(is_right[number][first - 1 : end - 1]) for number, row in enumerate(made) for first, end in row.answers
        ]
        if answers:
            shares[name] = sum(answers) / len(answers)
    return shares
