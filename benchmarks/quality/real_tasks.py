"""The three measures of `quality.real_model`: a novel predicted, a fact found, a rule of the system prompt followed.

Every measure reads several texts as rows of one cache. Its result is a dictionary of plain numbers for a JSON line.
"""

import random
import re
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from windlass import CacheOptions, KVCache, generate, prefill, system_tokens
from windlass.engine.templates import first_prompt, message, next_prompt, user_end, user_start
from windlass.engine.text import encode
from windlass.evals import texts

BLOCK = 256  # tokens. The mean loss of a block is one sample of a paired interval
STREAM_ROWS, FACT_ROWS, CHATS = 8, 24, 8
LONG, LONG_ROWS = 4096, 2  # a stretch beyond so many tokens has more blocks, so fewer of them serve
PINNED = 32  # tokens at the start of a novel that stand for a prompt where there is none
TURNS, REPLY = 16, 24
INTRO = "Read this text carefully, for I shall ask about it.\n\n"
RULE = 'You are a helpful assistant. Every answer must begin with the word "{word}" and be one sentence long.'
TOPICS = ("tea", "rain", "bread", "cats", "trains", "music", "winter", "bees", "chess", "maps", "coffee", "wool")


@dataclass(frozen=True)
class Material:
    """A model with its tokenizer, and the token ids of the novels."""

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    novels: list[list[int]]

    @classmethod
    def of(cls, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, files: list[Path]) -> "Material":
        """Read the files, without the runs of white space that files of novels have."""
        bodies = [re.sub(r"[ \t\r\f]+", " ", file.read_text()) for file in files]
        return cls(model, tokenizer, [tokenizer(body, add_special_tokens=False).input_ids for body in bodies])

    def spans(self, rows: int, tokens: int, part: int) -> list[list[int]]:
        """Stretches of equal length, spread over all novels in turn. Each `part` has others."""
        found = []
        for row in range(rows):
            ids = self.novels[row % len(self.novels)]
            room = max(len(ids) - tokens, 0)
            start = random.Random(f"{part} {row}").randrange(room // 20, room + 1)  # past the text before a novel
            found.append(ids[start : start + tokens])
        return found


@torch.inference_mode()
def streamed(material: Material, options: CacheOptions, tokens: int, part: int, has_twin: bool) -> dict[str, object]:
    """Mean loss, in nats per token, of each block of each row. With `has_twin` a full cache reads beside it.

    Then `kl` is the mean divergence of the predictions with the cache from those of the full one, in nats per token,
    and `same` the share of tokens whose most likely successor is the same, both past the first half of the text.
    """
    rows = STREAM_ROWS if tokens <= LONG else LONG_ROWS
    ids = torch.tensor(material.spans(rows, tokens + 1, part))
    cache = KVCache.from_options(material.model, replace(options, batch=len(ids), rollback=0))
    full = KVCache(material.model, chunk=options.chunk, batch=len(ids), rollback=0) if has_twin else None
    losses, divergences, agreed = [], list[torch.Tensor](), list[torch.Tensor]()
    for start in range(0, tokens, options.chunk):
        end = min(start + options.chunk, tokens)
        ours = material.model(ids[:, start:end], past_key_values=cache).logits.float().log_softmax(-1)
        losses.append(-ours.gather(-1, ids[:, start + 1 : end + 1, None])[..., 0])
        if full is not None:
            wanted = material.model(ids[:, start:end], past_key_values=full).logits.float().log_softmax(-1)
            if start >= tokens // 2:
                divergences.append((wanted.exp() * (wanted - ours)).sum(-1))
                agreed.append((wanted.argmax(-1) == ours.argmax(-1)).float())
    means = [[round(float(each.mean()), 4) for each in row.split(BLOCK)] for row in torch.cat(losses, 1)]
    found: dict[str, object] = {"blocks": means}
    if full is not None:
        kl, same = torch.cat(divergences, 1), torch.cat(agreed, 1)
        found |= {"kl": float(kl.mean()), "same": float(same.mean()), "n": kl.numel()}
    return found | {"bytes_held": cache.bytes_held, "recall_bytes": cache.recall_bytes}


@torch.inference_mode()
def facts(material: Material, options: CacheOptions, tokens: int, part: int, is_pinned: bool) -> dict[str, object]:
    """Facts found, one in each text: half of them numbers, half of them words, at depths spread over the text.

    The text is read as the beginning of a message, blind, and evicted as it is read. The question follows. With
    `is_pinned` the template's head and the sentence before the text are sinks. A model without a chat template reads
    the text alone, and goes on with the beginning of the answer.
    """
    draw, tokenizer = random.Random(f"facts {part}"), material.tokenizer
    is_chat = bool(tokenizer.chat_template)
    head = encode(tokenizer, user_start(tokenizer, INTRO) if is_chat else INTRO, is_start=True)
    prompts, asked, values = [], [], []
    for row, body in enumerate(material.spans(FACT_ROWS, tokens - len(head), 1000 + part)):
        kind = "number" if row % 2 else "word"
        name, value = texts.pair(draw), texts.number(draw) if row % 2 else draw.choice(texts.NOUNS)
        fact = encode(tokenizer, f" The magic {kind} of {name} is {value}.", is_start=False)
        ends = [at + 1 for at, token in enumerate(body[: -len(fact)]) if str(tokenizer.decode([token])).endswith(".")]
        aim = (row + 0.5) / FACT_ROWS * len(body)
        place = min((abs(end - aim), end) for end in ends or [0])[1]
        prompts.append(head + body[:place] + fact + body[place : len(body) - len(fact)])
        question = user_end(tokenizer, f"\n\nWhat is the magic {kind} of {name}?") if is_chat else "\n\n"
        asked.append(f"{question}The magic {kind} of {name} is")
        values.append(value)
    options = replace(options, sinks=len(head)) if is_pinned else options
    cache = KVCache.from_options(material.model, replace(options, batch=FACT_ROWS, rollback=0))
    prefill(material.model, cache, prompts)
    answers = generate(material.model, tokenizer, asked, cache, 12)
    hits = [value in answer.text for value, answer in zip(values, answers, strict=True)]
    found: dict[str, object] = {"found": sum(hits), "numbers": sum(hits[1::2]), "words": sum(hits[::2])}
    return found | {"n": FACT_ROWS, "bytes_held": cache.bytes_held, "recall_bytes": cache.recall_bytes}


@torch.inference_mode()
def chats(material: Material, options: CacheOptions, part: int) -> dict[str, object]:
    """Replies that begin as the system prompt asks, while turns quote novels. `late`: in the second half."""
    draw, tokenizer, model = random.Random(f"chats {part}"), material.tokenizer, material.model
    words = [texts.pair(draw).partition("-")[2].title() for _ in range(CHATS)]
    systems = [message("system", RULE.format(word=word)) for word in words]
    talks = [[system] for system in systems]
    cache = KVCache.from_options(model, replace(options, batch=CHATS, rollback=0))
    if options.sinks == "system":
        for row, system in enumerate(systems):
            cache.set_sinks(system_tokens(tokenizer, [system]), row)
    quotes = [material.spans(CHATS, 48, 2000 + TURNS * part + turn) for turn in range(TURNS)]
    hits, ended = [], [""] * CHATS
    for turn in range(TURNS):
        prompts = []
        for row, talk in enumerate(talks):
            topic, quoted = TOPICS[(turn + row) % len(TOPICS)], str(tokenizer.decode(quotes[turn][row])).split()
            talk.append(message("user", f'I read this: "{" ".join(quoted)}" Now tell me about {topic}.'))
            text = next_prompt(tokenizer, talk, ended[row]) if turn else first_prompt(tokenizer, talk)
            prompts.append(text)
        replies = generate(model, tokenizer, prompts, cache, REPLY)
        for row, reply in enumerate(replies):
            talks[row].append(message("assistant", reply.text))
            last = str(tokenizer.decode(reply.tokens[-1:]))
            ended[row] = last if last in tokenizer.all_special_tokens else ""
            hits.append(reply.text.strip().strip('"').startswith(words[row]))
    late, seen = hits[len(hits) // 2 :], max(cache.tokens_seen)
    return {"found": sum(hits), "n": len(hits), "late": sum(late), "late_n": len(late), "tokens_seen": seen}
