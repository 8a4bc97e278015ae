"""What a server takes of a request at most."""

from dataclasses import dataclass, field
from typing import Final

from windlass.core.spec import AUTO
from windlass.policies import NAMES
from windlass.positions.modes import MODES
from windlass.serve.models import ModelFacts
from windlass.stores.spec import STORES

MEGABYTE: Final = 1 << 20


@dataclass(frozen=True)
class RequestLimits:
    """Hard limits of one request. `texts`: of all its prompts, times `n`. `characters`: of all its prompts, before they
    become tokens; `grammar_bytes` of a JSON schema, and of tools. A body must have come after `body_seconds`."""

    body_bytes: int = 8 * MEGABYTE
    body_seconds: float = 60.0
    characters: int = 4_000_000
    messages: int = 4096
    chunks: int = 256
    prompts: int = 16
    choices: int = 8
    texts: int = 16
    stops: int = 16
    stop_characters: int = 256
    biases: int = 1024
    top_logprobs: int = 20
    tools: int = 128
    grammar_bytes: int = 64 << 10
    grammar_depth: int = 32


@dataclass(frozen=True)
class CacheChoices:
    """What a request may choose of its cache: numbers up to these, and these names; `name`: signs of one that it makes
    up. Arguments of a policy, and files, are for whoever starts the server."""

    budget: int = 1 << 20
    sinks: int = 4096
    window: int = 1 << 16
    recall: int = 1 << 16
    name: int = 64
    policy: tuple[str, ...] = (AUTO, *sorted(NAMES))
    positions: tuple[str, ...] = tuple(MODES)
    store: tuple[str, ...] = tuple(STORES)


@dataclass(frozen=True)
class ServerSettings:
    """How a server behaves. `name`: the model's, for clients; `keys`: one of them must come with each request, none:
    no key is asked for. A comment goes to a silent stream after `ping_seconds`."""

    name: str
    keys: tuple[str, ...] = ()
    hosts: tuple[str, ...] | None = None
    """Names under which the server may be called; None: any. A page in a browser may give any name to this machine."""
    request: RequestLimits = RequestLimits()
    cache: CacheChoices = CacheChoices()
    ping_seconds: float = 10.0
    stop_seconds: float = 10.0
    origins: tuple[str, ...] = ()
    """Pages that a browser may let read answers, as `https://app.example`; `*`: any."""
    facts: ModelFacts = field(default_factory=ModelFacts)
    salt: bytes | None = None
    """Makes names of owners out of their keys; None: another one each time the server starts."""
