"""Windlass against plain transformers on one model in float32, eager attention. In bfloat16 both against float32."""

import copy
import re
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from families.passes import distance, fed, narrowed, one_shot, text
from families.served import served
from families.tiny import WORDS, Family, tiny
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

import windlass
from windlass import KVCache, UnsupportedModel, UsageError
from windlass.hf.attach import attached
from windlass.policies import Recent

TOLERANCE = 1e-4  # of a standard deviation of the logits
SHORT, SHORTER, LONG = 45, 29, 300
CHUNKS = (1, 7, SHORT)
LONG_CHUNK = 64
WRITTEN = 12
BUDGET, SINKS = 20, 3


@dataclass
class Findings:
    """The findings of the checks of one class, as they are written."""

    outcome: str = "equal"
    reason: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    """The largest difference of each check, in standard deviations of the logits."""
    notes: list[str] = field(default_factory=list)
    served: dict[str, Any] = field(default_factory=dict)
    """See `families.served`."""

    def fail(self, outcome: str, reason: str) -> None:
        """Keep the worst outcome, and its first reason."""
        ranks = ("equal", "raises", "wrong")
        if ranks.index(outcome) > ranks.index(self.outcome):
            self.outcome, self.reason = outcome, reason


@torch.no_grad()
def examine(family: Family) -> Findings:
    """Build the class, run it plainly, attach it and compare."""
    try:
        plain = tiny(family)
    except Exception as error:
        return Findings("not built", gist(error))
    plain.generation_config = GenerationConfig(pad_token_id=0)
    findings = Findings()
    try:
        before = _plain_passes(plain, findings)
    except Exception as error:
        return Findings("no text alone", gist(error))
    model = copy.deepcopy(plain)
    try:
        windlass.attach(model)
    except UnsupportedModel as error:
        return Findings("refused", re.sub(rf"^{type(model).__name__}:? ", "", str(error)))
    except Exception as error:
        return Findings("raises", f"attach: {gist(error)}")
    before_checks = copy.deepcopy(findings)
    _check(plain, model, findings)
    if findings.outcome == "wrong" and attached(model).kinds.is_recurrent:
        before_checks.notes.append(
            f"with PyTorch's linear layers, with ours {findings.reason}, {_of_exact(plain, model)}"
        )
        findings = before_checks
        model = windlass.attach(copy.deepcopy(plain), own_linear=False)
        _check(plain, model, findings)
    findings.served = served(family, model)
    _undisturbed(model, before, findings)
    _in_bfloat16(family, plain, findings)
    return findings


def _check(plain: PreTrainedModel, model: PreTrainedModel, findings: Findings) -> None:
    """All checks of a model that is attached."""
    for name, check in CHECKS.items():
        try:
            check(plain, model, findings, name)
        except Exception as error:
            findings.fail("raises", f"{name}: {gist(error)}")
            findings.notes.append(f"{name}: {gist(error)}")


def _of_exact(plain: PreTrainedModel, model: PreTrainedModel) -> str:
    """How far the attached model, token by token, and the plain one are from float64."""
    ids = text(SHORT, 1)
    exact = copy.deepcopy(plain).double()
    exact.set_experts_implementation("eager")  # the other one takes no float64
    truth = one_shot(exact, ids)
    ours, theirs = fed(model, KVCache(model), ids, 1), one_shot(plain, ids)
    far, own = (float(distance(each.double(), truth).max()) for each in (ours, theirs))
    return f"and {far:.1e} from float64, plain in one pass {own:.1e}"


def gist(error: Exception) -> str:
    """The kind of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"


def _plain_passes(model: PreTrainedModel, findings: Findings) -> Tensor:
    """The plain model's logits. Notes what it does not react to, without which a check says little."""
    ids = text(SHORT, 1)
    logits = one_shot(model, ids)
    assert logits.isfinite().all(), "plain logits are not finite"
    other = ids.clone()
    other[0, 5] = (other[0, 5] + 3) % WORDS
    moved = distance(one_shot(model, other), logits)
    if moved[0, :5].max() > TOLERANCE:
        findings.notes.append("plain: not causal")
    if moved[0, -1].max() < 10 * TOLERANCE:
        findings.notes.append("plain: the last token does not react to a token 39 before it")
    try:
        # A mask of ones, else positions with gaps are taken for packed texts.
        spread = one_shot(model, ids, attention_mask=torch.ones_like(ids), position_ids=torch.arange(SHORT)[None] * 2)
    except Exception as error:
        findings.notes.append(f"plain: takes no positions: {gist(error)}")
    else:
        if distance(spread, logits).max() < 10 * TOLERANCE:
            findings.notes.append("plain: does not react to moved positions")
    return logits


def _compare(
    findings: Findings, name: str, ours: Tensor, theirs: Tensor, alike: Callable[[], Tensor] | None = None
) -> None:
    """`theirs` is of one pass. States of recurrent layers round by how a text is cut: `alike` is cut as ours is."""
    error = float(distance(ours, theirs).max())
    if not error <= TOLERANCE and alike is not None:
        cut = alike()
        findings.notes.append(f"{name}: plain with a cache is {float(distance(cut, theirs).max()):.1e} from one pass")
        error = float(distance(ours, cut).max())
    findings.errors[name] = max(error, findings.errors.get(name, 0.0))
    if not error <= TOLERANCE:
        findings.fail("wrong", f"{name}: {error:.1e} of a standard deviation off")


def _chunks(plain: PreTrainedModel, model: PreTrainedModel, findings: Findings, name: str) -> None:
    """Short texts in all chunks."""
    ids = text(SHORT, 1)
    theirs = one_shot(plain, ids)
    for chunk in CHUNKS:
        ours = fed(model, KVCache(model), ids, chunk)
        _compare(findings, f"{name} {chunk}", ours, theirs, partial(fed, plain, None, ids, chunk))


def _long(plain: PreTrainedModel, model: PreTrainedModel, findings: Findings, name: str) -> None:
    ids = text(LONG, 2)
    ours = fed(model, KVCache(model), ids, LONG_CHUNK)
    _compare(findings, name, ours, one_shot(plain, ids), partial(fed, plain, None, ids, LONG_CHUNK))


def _generate(plain: PreTrainedModel, model: PreTrainedModel, findings: Findings, name: str) -> None:
    """The tokens that plain one-shot passes choose one by one, otherwise the tokens of plain `generate`."""
    ids = expected = text(26, 3)
    for _ in range(WRITTEN):
        expected = torch.cat((expected, one_shot(plain, expected)[:, -1:].argmax(-1)), 1)
    options: dict[str, Any] = {"max_new_tokens": WRITTEN, "do_sample": False}
    generate: Callable[..., Tensor] = model.generate  # type: ignore[assignment]
    own: Callable[..., Tensor] = plain.generate  # type: ignore[assignment]
    try:
        ours = generate(ids, past_key_values=KVCache(model), **options)
    except Exception as error:
        _raise_unless_plain_does(findings, name, error, partial(own, ids, **options))
        return
    if ours.tolist() == expected.tolist():
        return
    if ours.tolist() != own(ids, **options).tolist():
        findings.fail("wrong", f"{name}: other tokens than plain generate and plain one-shot passes")
    findings.notes.append(f"{name}: as plain generate, which differs from plain one-shot passes")


def _ragged(plain: PreTrainedModel, model: PreTrainedModel, findings: Findings, name: str) -> None:
    """Rows of two lengths, padded on the left with a word. Each must read as if it were alone."""
    rows = [text(SHORT, 4), text(SHORTER, 5)]
    padding = torch.full((1, SHORT - SHORTER), 7)
    ids = torch.cat((rows[0], torch.cat((padding, rows[1]), 1)))
    mask = torch.ones_like(ids)
    mask[1, : SHORT - SHORTER] = 0
    for chunk in (7, SHORT):
        try:
            ours = fed(model, KVCache(model, batch=2), ids, chunk, mask)
        except UsageError as error:
            if "position_ids" not in str(error):
                raise
            findings.notes.append(f"{name} at {chunk}: needs the caller's position_ids")
            ours = fed(model, KVCache(model, batch=2), ids, chunk, mask, placed=True)
        except Exception as error:
            _raise_unless_plain_does(findings, f"{name} at {chunk}", error, partial(fed, plain, None, ids, chunk, mask))
            continue
        for row, alone in enumerate(rows):
            part = ours[row : row + 1, SHORT - alone.shape[1] :]
            alike = partial(_of_row, plain, ids, chunk, mask, row)
            _compare(findings, name, part, one_shot(plain, alone), alike)


def _of_row(plain: PreTrainedModel, ids: Tensor, chunk: int, mask: Tensor, row: int) -> Tensor:
    """The tokens of one of plain ragged rows, read in chunks with a cache."""
    return fed(plain, None, ids, chunk, mask, placed=True)[row : row + 1, int((mask[row] == 0).sum()) :]


def _budget(plain: PreTrainedModel, model: PreTrainedModel, findings: Findings, name: str) -> None:
    """Token by token in few slots, against one pass of the plain model under the mask that this amounts to."""
    ids = text(SHORT, 6)
    newest = BUDGET - SINKS

    def kept(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:  # noqa: ARG001
        return (key < SINKS) | (query - key <= newest)

    with narrowed(kept) as uses:
        theirs = one_shot(plain, ids)
    if not uses:
        findings.notes.append(f"{name}: not compared, the model makes its own masks")
        return
    cache = KVCache(model, BUDGET, Recent(), sinks=SINKS)

    def alike() -> Tensor:
        with narrowed(kept):
            return fed(plain, None, ids, 1)

    _compare(findings, name, fed(model, cache, ids, 1), theirs, alike)


def _raise_unless_plain_does(findings: Findings, name: str, error: Exception, plain: Callable[[], object]) -> None:
    """Raise `error`, unless plain transformers fails there with one of the same kind."""
    try:
        plain()
    except Exception as own:
        if type(own) is type(error):
            findings.notes.append(f"{name}: plain transformers raises, too: {gist(own)}")
            return
    raise error


def _undisturbed(model: PreTrainedModel, before: Tensor, findings: Findings) -> None:
    """The attached model without our cache, then detached: to the bit what it was."""
    for state in ("attached", "detached"):
        if not torch.equal(one_shot(model, text(SHORT, 1)), before):
            findings.fail("wrong", f"the bare {state} model differs from what it was")
        if state == "attached":
            windlass.detach(model)


def _in_bfloat16(family: Family, plain: PreTrainedModel, findings: Findings) -> None:
    """Errors and top tokens of both in bfloat16, against float32."""
    low = tiny(family, torch.bfloat16)
    low.load_state_dict(plain.state_dict())
    ids = text(LONG, 7)
    exact = one_shot(plain, ids)
    theirs = one_shot(low, ids)
    try:
        windlass.attach(low)
        ours = fed(low, KVCache(low), ids, LONG_CHUNK)
    except UnsupportedModel as error:
        if findings.outcome == "equal":
            findings.outcome, findings.reason = "refused", f"in bfloat16 {str(error).partition(' ')[2]}"
        return
    except Exception as error:
        findings.fail("raises", f"bfloat16: {gist(error)}")
        return
    for who, logits in (("windlass", ours), ("plain", theirs)):
        findings.errors[f"bfloat16 {who}"] = float((logits.float() - exact).norm() / exact.norm())
        agree = (logits.argmax(-1) == exact.argmax(-1)).float().mean()
        findings.errors[f"bfloat16 top tokens {who}"] = float(agree)
    if not findings.errors["bfloat16 windlass"] <= 1.5 * findings.errors["bfloat16 plain"]:
        findings.fail("wrong", "bfloat16: further from float32 than plain bfloat16 is")


CHECKS: dict[str, Callable[[PreTrainedModel, PreTrainedModel, Findings, str], None]] = {
    "chunks of": _chunks,
    f"{LONG} tokens": _long,
    f"budget {BUDGET}": _budget,
    # The last: some wrappers remember the positions of a batch, or the positions that `generate` gave them.
    "ragged rows": _ragged,
    "generate": _generate,
}
