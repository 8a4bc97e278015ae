"""Which prompts with parts an engine takes."""

from windlass.cache.options import CacheOptions
from windlass.core.errors import UsageError
from windlass.engine.chunks_recompute import Everything
from windlass.engine.request import PromptParts
from windlass.policies.interfaces import OneShot
from windlass.policies.wrapper import find


def check_parts(parts: PromptParts, tokens: int, options: CacheOptions, kept_bytes: int) -> None:
    """Check parts of a prompt of so many tokens, for a row with these options. `kept_bytes` are for what is kept.

    What a model itself cannot do is told once it is tried. Parts of which all is read again are text like any other,
    and need none of this.

    Raises: UsageError, whose text begins with `chunks`.
    """
    end = 0
    for start, stop in parts.spans:
        if not end <= start < stop:
            raise UsageError(f"chunks: the parts must be in order and have tokens, got {parts.spans}")
        end = stop
    if not parts.spans or end >= tokens:
        raise UsageError("chunks: the prompt must have parts, and text behind the last one, which the reply follows")
    if isinstance(parts.recompute, Everything):
        return
    way_out = 'or ask for recompute "all", which reads parts as text'
    if kept_bytes == 0:
        raise UsageError(f"chunks: this server keeps no parts; start it with memory for them (--reuse), {way_out}")
    if find(options.policy, OneShot) is not None:
        raise UsageError(
            f"chunks: policy {options.policy!r} ranks a prompt when all of it is held; choose another policy, {way_out}"
        )
    if options.recall:
        raise UsageError(
            f"chunks: recall={options.recall} would need a second copy of each part; leave recall out, {way_out}"
        )
    if options.merge is not None:
        raise UsageError(f"chunks: merge={options.merge} joins tokens; serve rows without merge, {way_out}")
    if options.budget is not None and end > options.budget:
        raise UsageError(
            f"chunks: up to the end of the last part there are {end} tokens, and a row keeps {options.budget}; parts "
            f"are joined whole: ask for a larger budget, {way_out}"
        )
