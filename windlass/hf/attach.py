"""Attach a cache to a model of transformers, and undo it.

A model is neither forked nor copied. In a forward pass with an attached cache, and in no other, its rotary module
returns the identity, so that the keys it hands to `past_key_values.update` are not rotated. Its attention function is
ours, which lets the cache write, attend, observe and evict.
"""

import inspect
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import get_ident
from typing import Any, Final

import torch
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel

from windlass.cache.cache import TextCache
from windlass.core.errors import UnsupportedModel, UsageError, WindlassError
from windlass.core.ranks import RankHeads
from windlass.core.step import READ, AttentionCall
from windlass.hf.cpu_decoder import Attachment, few_rows_of
from windlass.hf.deepseek import (
    EXPAND,
    IndexedLayers,
    Indexer,
    IndexerCall,
    Latent,
    check_picks,
    indexed_layers,
    indexers_of,
)
from windlass.hf.mask import Mask, mask
from windlass.hf.model_facts import check_kind_of_model, device_of_inputs, refusal
from windlass.hf.mrope import Axes, AxisRotation, RopeDeltas, tell_deltas, turn_of, turned_by_differences
from windlass.hf.passes import (
    BUSY,
    GENERATE,
    POSITIONS,
    AttributePatch,
    ModuleState,
    RunningPass,
    WholePass,
    at_positions,
    cache_name,
    check_arguments,
    check_call,
    check_model,
    inference_only,
    model_input,
    not_compiled,
    real_columns,
    sees_to,
    token_types,
    with_cache_as,
)
from windlass.hf.probe import (
    ROTARY,
    DecoderModules,
    OwnConfigs,
    Probe,
    QueryScale,
    decoder_of,
    probed_positions,
    query_scales,
    run,
)
from windlass.hf.recurrent import Columns, columns_of, layer_kinds, meta_states
from windlass.hf.rope import rotaries_of, tolerance_of
from windlass.hf.self_check import OPTIONS, CheckCache, SelfCheck
from windlass.hf.tensor_parallel import heads_of, ranks_of
from windlass.kernels import cpu
from windlass.positions.rotary import Rotary, unturned

WAY_OUT: Final = "Pass the whole conversation as it was read, followed by the new text, or call cache.reset() first"
ASSISTED: Final = ("assistant_model", "prompt_lookup_num_tokens", "assistant_early_exit")  # options of `generate`
STATEFUL: Final = "_is_stateful"  # the name of transformers' mark of such models
UNKNOWN: Final = -1  # in place of the id of padding, or of a token that came without one


class CheckedGenerate:
    """`generate` of an attached model, which first compares its text with the cache's.

    It replaces the model's own `generate` until `remove`.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._own = model, vars(model).get("generate")
        bound: Any = model.generate
        self._generate: Callable[..., Any] = bound
        vars(model)["generate"] = self.generate

    def remove(self) -> None:
        """Leave the model as it was found."""
        del vars(self._model)["generate"]
        if self._own is not None:
            vars(self._model)["generate"] = self._own

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Generate as the model does, with the same arguments. Raises: UsageError for a text that does not go on."""
        kwargs = with_cache_as(GENERATE, kwargs)
        cache, mask, embeds = (kwargs.get(name) for name in (GENERATE, "attention_mask", "inputs_embeds"))
        ids = args[0] if args else kwargs.get("input_ids", kwargs.get("inputs"))
        columns: Any = ids if embeds is None else embeds
        # A mask with more columns than ids tells that the call passes only the new tokens.
        is_whole = isinstance(columns, Tensor) and (mask is None or mask.shape[1:2] == columns.shape[1:2])
        if isinstance(cache, TextCache) and is_whole:
            check_continues(cache, columns.shape[1], None if columns is embeds else ids)
            if cache.columns_seen:
                self._check_unassisted(cache.columns_seen, kwargs)
                if not cache.batch_size % len(columns):
                    tell_deltas(self._model, cache, len(columns))
        with takes_drafts(self._model) if isinstance(cache, TextCache) else nullcontext():
            return self._generate(*args, **kwargs)

    def _check_unassisted(self, seen: int, kwargs: dict[str, Any]) -> None:
        """Raises: UsageError for assisted decoding, which reads the whole text in its first pass."""
        config = kwargs.get("generation_config") or self._model.generation_config
        given = {name: kwargs.get(name, getattr(config, name, None)) for name in ASSISTED}
        if name := next((name for name, value in given.items() if value), None):
            raise UsageError(
                f"{name}: transformers' assisted decoding begins with an empty cache, and this one has read {seen} "
                "tokens. Leave it out, or continue with windlass.generate(..., speculate=...)"
            )


@contextmanager
def takes_drafts(model: PreTrainedModel) -> Iterator[None]:
    """Let `generate` assist models with recurrent layers in a block, whose drafts a cache of ours takes back."""
    own = vars(model)
    if STATEFUL in own or not model._is_stateful:
        yield
        return
    own[STATEFUL] = False
    try:
        yield
    finally:
        del own[STATEFUL]


def check_continues(cache: TextCache, columns: int, ids: Tensor | None) -> None:
    """Compare a text of `columns`, with these `ids` (rows, columns), with the text of the cache.

    Rows, or columns, whose ids the cache does not know are not compared.

    Raises: UsageError where the text does not begin with the cache's.
    """
    seen = cache.columns_seen
    if not seen:
        return
    if columns <= seen:
        raise UsageError(
            f"generate was given a text of {columns} tokens, and this cache has read {seen} before. {WAY_OUT}"
        )
    if ids is None or cache.batch_size % len(ids):
        return
    read = torch.tensor([_columns_of(cache, row)[:seen] for row in range(cache.batch_size)])
    given = ids[:, :seen].cpu().repeat_interleave(cache.batch_size // len(ids), 0)  # as `generate` does for beams
    is_other = (read != UNKNOWN) & (read != given)
    if bool(is_other.any()):
        row, column = is_other.nonzero()[0].tolist()
        raise UsageError(
            f"generate was given another text than this cache has read: token {column} of row {row} is "
            f"{int(given[row, column])}, and was {int(read[row, column])}. {WAY_OUT}"
        )


def _columns_of(cache: TextCache, row: int) -> list[int]:
    """The id that a row was fed in each column, UNKNOWN for padding, and where it is not known."""
    its = cache.rows.rows[row]
    tokens = its.tokens
    padding = {column for start, end in its.padding or () for column in range(start, end)}
    if tokens is None or len(tokens) + len(padding) != its.columns:
        return [UNKNOWN] * its.columns
    ids = iter(tokens)
    return [UNKNOWN if column in padding else next(ids) for column in range(its.columns)]


NAME = "windlass"  # of the attention function, and of the attribute on an attached model


class AttachedModel(Attachment):
    """Facts about an attached model, and the cache of the running pass."""

    def __init__(self, model: PreTrainedModel, decoder: DecoderModules, own_linear: bool) -> None:
        rotary_modules, outer = decoder.rotary_modules, decoder.outer
        self._rotary_modules = frozenset(rotary_modules)
        self._configs, self.kinds = OwnConfigs(decoder.modules), layer_kinds(model)
        self.model, self.decoder = model, decoder
        self._signature, self._cache_name = inspect.signature(outer.forward), cache_name(outer.forward)
        self._handles: list[RemovableHandle] = [
            module.register_forward_hook(self._rotary_hook, with_kwargs=True) for module in rotary_modules
        ]
        self.whole = WholePass(model)
        self._deltas = RopeDeltas(model)
        self.axes = Axes(0, False)
        self._replaced = AttributePatch(outer, "forward", self.forward)
        self.latents = {
            module: Latent(module, self._is_served)
            for module in decoder.attention_modules
            if callable(getattr(module, EXPAND, None))
        }
        self.indexers = indexers_of(decoder.attention_modules, self._is_ours, self._note_indexer)
        self.indexed = IndexedLayers()
        self.own_linear = own_linear
        self.heads: RankHeads | None = None  # heads of this process under tensor parallelism
        self.known, self.few_rows = few_rows_of(model, decoder.inner, self.whole, NAME, own_linear)
        self.columns: list[Columns] = []  # recurrent layers of which some tokens are read one by one
        self._attending: frozenset[nn.Module] = frozenset()  # modules that call attention
        self._generate = CheckedGenerate(model) if model.can_generate() else None
        self._windows: dict[int, int | None] = {}  # per layer, as the model's text masks have them
        self._chunks: dict[int, int | None] = {}  # per layer, lengths of attention chunks
        self.rotaries: list[Rotary | None] = []  # per attention layer (None: it does not rotate)
        self.numbers: dict[nn.Module, int] = {}  # of attention modules that have none of their own
        self.query_scales: dict[int, QueryScale] = {}
        self.states: dict[str, Tensor] = {}  # of recurrent layers, on "meta": their shapes for one row
        self.key_means: list[Tensor | None] | None = None  # measured when a store first asks for it
        self._running: dict[str, RunningPass] = {}  # none or one: a dict's `setdefault` admits one thread only
        self.attended: set[int] = set()  # layers, in the pass that is running
        self.probe: Probe | None = None

    def remove(self) -> None:
        """Leave the decoder as it was found."""
        for handle in (*self._handles, *self._deltas.handles):
            handle.remove()
        inner = [*(each.replaced for each in self.latents.values()), *(each.replaced for each in self.indexers)]
        for replaced in (
            *self.few_rows,
            *inner,
            *(each.replaced for each in self.columns),
            self._replaced,
            self.whole.replaced,
        ):
            replaced.put_back()
        if self._generate is not None:
            self._generate.remove()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The forward pass of the decoder's outer module, a step of the cache where the pass has one of ours.

        Replaces hooks, which are not called when a pass is interrupted. The arguments are those of the model at hand,
        passed on as they come.
        """
        kwargs = with_cache_as(self._cache_name, kwargs)
        bound = self._signature.bind_partial(*args, **kwargs).arguments
        bound = {**bound.pop("kwargs", {}), **bound}
        if isinstance(cache := bound.get(self._cache_name), TextCache):
            output = self._step(cache, bound, args, kwargs)
            return self.known.as_output(output, cache) if isinstance(output, Tensor) else output
        if self._running:
            raise UsageError(BUSY)
        return self._replaced.original(*args, **kwargs)

    def token(self, model: nn.Module, ids: Tensor, cache: TextCache) -> Tensor | None:
        """(batch, 1, vocabulary) logits of a pass of one column, which calls the decoder and the head by themselves.

        None, and no effect, where others may have put code around these: then the model is to be called.
        """
        is_whole = model is self.model and self.decoder.outer is self.decoder.inner and not torch.is_grad_enabled()
        if not is_whole or not self.known.is_all_of(model, self._replaced):
            return None
        given: dict[str, Any] = {"input_ids": ids, self._cache_name: cache}

        def work() -> Tensor:
            output = self._step(cache, given, (), given)
            head: Any = model._modules["lm_head"]  # `get_submodule` takes several calls
            logits: Tensor = head(output if isinstance(output, Tensor) else output[0])
            return logits

        return self.whole.take(cache, 1, work)

    def _step(self, cache: TextCache, bound: dict[str, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A pass with our cache. One that fails, or is interrupted at any line, leaves no trace.

        Returns the output of the decoder's own code, or hidden states.
        """
        mine = RunningPass(cache)
        try:
            self._begin(mine, bound)
            is_whole = self.decoder.outer is self.decoder.inner
            output = self.known.output(args, kwargs) if is_whole else None
            if output is None:
                self._configs.exchange(NAME)
                args, kwargs = at_positions(cache, list(self._signature.parameters), args, kwargs)
                output = self._replaced.original(*args, **kwargs)
            self._commit(mine)
            return output
        except BaseException:
            self._take_back(mine)
            raise

    @not_compiled
    def _begin(self, mine: RunningPass, bound: dict[str, Any]) -> None:
        mine.thread = get_ident()
        self.whole.begin(mine)
        if self._running.setdefault("pass", mine) is not mine:
            raise UsageError(BUSY)
        step = self._checked(mine.cache, bound)
        mine.before, mine.types = mine.cache.text, token_types(bound)
        if mine.types is not None and step[1] > 1:  # perhaps with a picture, which is read in one piece
            mine.cache.schedule(replace(mine.cache.next_pass, is_prompt=True))
        mine.cache.begin(*step)
        self.attended.clear()

    @not_compiled
    def _commit(self, mine: RunningPass) -> None:
        self._configs.give_back()
        mine.cache.commit()
        mine.cache.schedule(READ)
        self.whole.end(mine, is_complete=True)
        del self._running["pass"]

    @not_compiled
    def _take_back(self, mine: RunningPass) -> None:
        self.whole.end(mine, is_complete=False)
        if self._running.get("pass") is mine:
            self._configs.give_back()
            del self._running["pass"]
        if mine.before is not None:
            mine.cache.take_back(mine.before)
            mine.cache.schedule(READ)

    @property
    def current_cache(self) -> TextCache | None:
        """The cache of the pass that runs in this thread."""
        running = self._running.get("pass")
        return running.cache if running is not None and running.thread == get_ident() else None

    def place(self, layer: int, keys: Tensor) -> tuple[int, bool]:
        """Which of the cache's layers a layer of the model attends to, and whether another one has written that.

        Raises: UsageError where `keys` are not those that attach has seen it attend to.
        """
        source, handed = self.kinds.sources.get(layer), self._running["pass"].keys
        if source is None:
            handed[layer] = keys
        elif handed.get(source) is not keys:
            raise UsageError(
                f"layer {layer} attends to other keys than at attach, when it read the keys of layer {source}"
            )
        return self.kinds.place(layer), source is not None

    def call(self, layer: int, mask: Mask, scale: float, softcap: float | None, sinks: Tensor | None) -> AttentionCall:
        """The arguments of a layer's attention under this mask. Raises: UsageError for an unsupported mask."""
        mask = mask.whole
        window, chunk = mask.window if mask.is_causal else self._windows[layer], self._chunks[layer]
        picker = self.indexed.picker(layer, self._running["pass"])
        if chunk is not None:
            if not mask.is_causal:
                raise UsageError(f"layer {layer} attends within chunks of {chunk} tokens by a mask that is not causal")
            return AttentionCall(scale, None, softcap, sinks, attention_chunk=chunk, picker=picker)
        seen = sees_to(self._running["pass"], mask, window)
        return AttentionCall(scale, window, softcap, sinks, seen, picker=picker)

    def text_call(self, layer: int, scale: float) -> AttentionCall:
        """The arguments of a layer's attention in a text, whose masks are causal."""
        chunk = self._chunks[layer]
        return AttentionCall(scale, None if chunk is not None else self._windows[layer], attention_chunk=chunk)

    def _note_indexer(self, indexer: Indexer, call: IndexerCall) -> None:
        """Note the arguments of an indexer's call, in a pass with a cache or a probe."""
        if self.probe is not None:
            self.probe.picks.note(indexer, call)
        else:
            self.indexed.note(indexer, call, self._running["pass"])

    def at_positions(self, layer: int, queries: Tensor) -> Tensor:
        """Queries that a layer scaled by their columns, scaled by their positions."""
        cache, scale = self._running["pass"].cache, self.query_scales.get(layer)
        if scale is None:
            return queries
        step = cache.text.pending
        assert step is not None, "attention outside of a pass"
        return scale.moved(queries, cache.columns_seen, step.positions)

    def probed(self, model: PreTrainedModel, is_identity: bool, columns_seen: int = 0) -> Probe:
        """One pass of one token, with or without rotation, by a cache that says it has seen so many columns."""
        self.probe = Probe(is_identity, columns_seen)
        try:
            with self._configs.exchanged(NAME):
                return run(self.probe, model, self.decoder.outer, self.kinds)
        finally:
            self.probe = None

    def find_rotaries(self, model: PreTrainedModel) -> None:
        """Find out how each layer rotates its keys, then read a short text with a cache, to see that it works.

        Raises: UnsupportedModel, UsageError for a model that does not.
        """
        rotated = self.probed(model, False)
        if rotated.axes and self.decoder.outer is not self.decoder.inner:
            raise UnsupportedModel("makes positions of several axes (M-RoPE) where no cache can see them")
        plain = self.probed(model, True)
        self._attending = frozenset(rotated.modules.values())
        self.rotaries = rotaries_of(model, rotated, plain)
        self.axes = Axes.found(rotated.axes, self.rotaries, device_of_inputs(model))
        self.query_scales = query_scales(rotated, partial(self.probed, model, False), tolerance_of(model))
        self._windows, self._chunks, self.numbers = rotated.windows, rotated.chunks, rotated.numbers
        self.kinds = replace(self.kinds, latents=rotated.latents).with_sources(rotated.sources)
        self.indexed = indexed_layers(
            self.kinds,
            self.rotaries,
            plain=plain.picks,
            rotated=rotated.picks,
            positions=probed_positions(model),
            tolerance=tolerance_of(model),
        )
        self.kinds = replace(self.kinds, indexed=self.indexed.widths)
        try:
            self._check(model, rotated)
        except UnsupportedModel:
            if not self.kinds.is_recurrent:
                raise
            self._read_by_token(forgets=True)
            self._check(model, rotated)

    def check_unchanged(self) -> None:
        """Raises: UsageError for a model whose attention or rotation is not what attach has seen any more."""
        left, is_new = [self.decoder.inner], False
        while left:  # `modules` takes twice as long, and each cache of a server comes here
            held = vars(module := left.pop())
            is_new |= NAME not in held and isinstance(held.get("layer_idx"), int)
            is_new |= module not in self._rotary_modules and type(module).__name__.endswith(ROTARY)
            left += [each for each in module._modules.values() if each is not None]
        if is_new or not all(rotary is None or rotary.is_current() for rotary in dict.fromkeys(self.rotaries)):
            raise UsageError(
                f"this {type(self.model).__name__} has got other attention or rotary modules, or another rotation, "
                "since it was attached. Call windlass.detach(model), then windlass.attach(model)"
            )

    def read_drafts(self) -> None:
        """Let recurrent layers read drafts token by token from now on, and copy their states between them.

        Raises: UsageError for a model in which they can't.
        """
        if self.kinds.is_recurrent and not self.columns:
            self._read_by_token(forgets=False)

    def _read_by_token(self, forgets: bool) -> None:
        modules = [each for each in self.decoder.attention_modules if each not in self._attending]
        layers = [number for number, _, _ in self.kinds.recurrent]
        self.columns = columns_of(modules, layers, lambda: self.current_cache, forgets)

    def _check(self, model: PreTrainedModel, probe: Probe) -> None:
        config = model.config.get_text_config()
        cache = CheckCache(self, OPTIONS, self.rotaries, device_of_inputs(model), config, self.kinds)
        cache.reset()
        SelfCheck(model, self.decoder.outer, probe.modules).run(cache, self._configs.exchanged("eager"))
        self.states = meta_states(cache.recurrent)
        cache.reset()
        self.known.prove(model, cache)

    def _checked(
        self, cache: TextCache, bound: dict[str, Any]
    ) -> tuple[int, int, Tensor | None, Tensor | None, Tensor | None, Tensor | None]:
        """Arguments of `TextCache.begin` for a pass with these arguments.

        Raises: UsageError for a pass that cannot begin.
        """
        if cache.model_id is not self:
            raise UsageError("this KVCache was made for another model, or before this one was attached. Make a new one")
        check_call((self.decoder.inner, self.decoder.outer), bound)
        columns, ids = model_input(bound)
        batch, tokens = columns.shape[:2]
        check_picks(self.indexers, cache, tokens, self.indexed.unserved)
        positions, axes = self.axes.split(bound.get(POSITIONS), self.decoder.first_position)
        if axes is not None and self._deltas.is_relative:
            axes = axes + torch.tensor([row.next_place for row in cache.rows.rows], device=axes.device)[:, None]
        return batch, tokens, real_columns(bound.get("attention_mask"), cache, tokens), positions, ids, axes

    def _rotary_hook(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        """Forward hook of the rotary modules: no rotation while a pass with a cache of un-rotated keys runs.

        `args` and `kwargs` are the module's own, which differ from model to model.
        """
        if self.probe is not None:
            return self.probe.rotary_output(module, args, kwargs, output)
        turn = self._turn() if self._running else AxisRotation.OWN
        if turn is AxisRotation.OWN:
            return output
        if turn is AxisRotation.DIFFERENCES:
            return turned_by_differences(module, args, kwargs)
        return unturned(output)

    @not_compiled
    def _is_served(self) -> bool:
        """Return True if the pass that runs in this thread has a cache of ours."""
        return self.probe is None and self.current_cache is not None

    @not_compiled
    def _is_ours(self) -> bool:
        """Return True if the pass that runs in this thread is one of ours, with a cache or a probe."""
        return self.probe is not None or self._is_served()

    @not_compiled
    def _turn(self) -> AxisRotation:
        """Rotation of the rotary modules in the running pass of this thread."""
        return turn_of(self.current_cache)


def attach(model: PreTrainedModel, own_linear: bool = True) -> PreTrainedModel:
    """Let `model` work with a `KVCache`. Returns the same model.

    Without our cache the model does the same as before, in training too. Attaching twice changes nothing. Two passes of
    one token find out how each layer rotates its keys. Then a short text is read with a cache and without, and a model
    that attends otherwise is refused. While a pass with our cache runs, a pass of another thread is refused. Give each
    thread a model of its own.

    `own_linear`: in a pass of at most 16 tokens with our cache, all rows counted, linear layers on a CPU are computed
    by a kernel of ours. So are the parts around attention in decoder layers that have the code of Llama, Mistral, Qwen2
    or Qwen3, which many families share. On a CPU without AMX so are passes of any length in bfloat16 over weights in
    groups of 4 bits, with VNNI of 8 bits, and with AVX2 alone those over all weights but float32. In other long passes
    PyTorch multiplies panels of quantised weights, and in float32 those of 16 bits where a CPU has no products of
    bfloat16. Hooks and modules put in place of others are called as before. docs/results/benchmarks.md compares it with
    PyTorch. It rounds otherwise, and the result of a token does not depend on the other tokens of a pass that the
    kernel takes. False: PyTorch's always.

    Of a model that transformers has spread over processes (tensor parallel) each process attaches its own part, and all
    of them do it together: docs/parallel.md.

    An attached model can be copied, pickled and saved with `torch.save`: the copy is attached, too.

    Raises: UnsupportedModel, naming the model and the reason. The model is then as it was. UsageError for an object
    that is no model of transformers, and for a model that is attached with another `own_linear`, or shares its layers
    with one that is attached.
    """
    check_model(model)
    before = _found(model)
    if before is not None and before.model is not model:
        raise UsageError(
            f"this {type(model).__name__} shares its layers with a {type(before.model).__name__} that is attached. Use "
            "that one, or call windlass.detach with either of them first"
        )
    if before is not None:
        if before.own_linear != own_linear:
            raise UsageError(
                f"own_linear={own_linear}, but the model is attached with {before.own_linear}. Detach it first"
            )
        return model
    state = ModuleState(model)
    try:
        # These few passes are not worth compiling if the model was compiled before.
        with torch.compiler.set_stance("force_eager"):
            check_kind_of_model(model)
            ranks = ranks_of(model)
            decoder = decoder_of(model)
            attachment = AttachedModel(model, decoder, own_linear)
            for module in (model, *decoder.attention_modules):
                setattr(module, NAME, attachment)
            attachment.find_rotaries(model)
            if ranks is not None:
                attachment.heads = heads_of(ranks, attachment.probed(model, False), attachment.kinds)
    except BaseException as error:
        state.put_back()
        if not isinstance(error, Exception):
            raise
        raise refusal(model, error) from (None if isinstance(error, WindlassError) else error)
    cpu.end_pool()  # the model may be used by another thread from now on
    return model


def detach(model: PreTrainedModel) -> PreTrainedModel:
    """Undo `attach`. Returns the same model. Its caches can no longer be used with it.

    `model` may also be the model inside of a PEFT wrapper, or the part of the attached model that PEFT left.
    """
    check_model(model)
    attachment = _found(model) or attached(model)
    attachment.remove()
    for module in (*attachment.model.modules(), *attachment.decoder.attention_modules):
        if isinstance(vars(module).get(NAME), AttachedModel):
            delattr(module, NAME)
    return model


def attached(model: PreTrainedModel) -> AttachedModel:
    """The attachment of the model. Raises: UsageError when it is not attached."""
    attachment = getattr(model, NAME, None)
    if not isinstance(attachment, AttachedModel):
        check_model(model)
        raise UsageError(f"{type(model).__name__} is not attached to windlass. Call windlass.attach(model) first")
    return attachment


def _found(model: nn.Module) -> AttachedModel | None:
    """The attachment of a model, or of one around it."""
    found = (vars(module).get(NAME) for module in model.modules())
    return next((each for each in found if isinstance(each, AttachedModel)), None)


@not_compiled
def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: object,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: object,
) -> tuple[Tensor, None]:
    """The attention function registered with transformers. Raises: UsageError for arguments that it does not know."""
    attachment, own = getattr(module, NAME), module.layer_idx
    assert isinstance(attachment, AttachedModel), "windlass attention outside of an attached model"
    assert isinstance(own, int), "an attention layer without a number"
    layer = attachment.numbers.get(module, own)
    picks = kwargs.pop("indices", None) if attachment.indexers else None
    check_arguments(layer, kwargs)
    if attachment.probe is not None:
        latent = attachment.latents.get(module)
        attachment.probe.picks.note_layer(own, picks)
        return attachment.probe.attention(module, own, query, key, value, attention_mask, latent), None
    cache = attachment.current_cache
    if cache is None:
        raise UsageError(BUSY)
    assert isinstance(attention_mask, Mask), "a mask that was not there when the model was attached"
    if layer in attachment.attended:
        raise UsageError(f"layer {layer} calls attention twice in one pass. A KVCache takes one call per layer")
    attachment.attended.add(layer)
    query = attachment.at_positions(layer, query)
    latent = attachment.latents.get(module)
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if latent is not None:
        query = latent.queries(query)
    place, is_shared = attachment.place(layer, key)
    rotary = attachment.rotaries[place]
    if rotary is not None:
        query, key = rotary.plain(query, key)
    call = attachment.call(layer, attention_mask, scale, softcap, s_aux)
    out = cache.attend_shared(place, query, call) if is_shared else cache.attend(place, query, key, value, call)
    out = inference_only(out, query, key, value)
    if latent is not None:
        out = latent.values(out)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(NAME, _attention)
AttentionMaskInterface.register(NAME, mask)
