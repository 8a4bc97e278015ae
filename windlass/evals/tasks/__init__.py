"""The tasks that are shipped: one family a file, all named in `NAMES`."""

from windlass.evals.task import Task
from windlass.evals.tasks.hidden import PassKey, Variables
from windlass.evals.tasks.niah import ABOVE, Multiturn, Needles
from windlass.evals.tasks.perplexity import Perplexity
from windlass.evals.tasks.words import CommonWords, FrequentWords
from windlass.evals.texts import NOISE, NOVEL, Novel

NAMES: dict[str, Task] = {
    "passkey": PassKey(),
    "passkey_words": PassKey(is_words=True),
    "passkey_novel": PassKey(NOVEL),
    "passkey_words_novel": PassKey(NOVEL, is_words=True),
    "niah_single": Needles(),
    "niah_single_2": Needles(haystack=NOVEL),
    "niah_single_3": Needles(haystack=NOVEL, value_kind="uuids"),
    "niah_multikey": Needles(keys=4, haystack=NOVEL),
    "niah_multikey_2": Needles(haystack=None),
    "niah_multikey_3": Needles(haystack=None, key_kind="uuids", value_kind="uuids"),
    "niah_multivalue": Needles(values=4, haystack=NOVEL),
    "niah_multiquery": Needles(keys=4, asked=4, haystack=NOVEL),
    "magic_single": Needles(haystack=NOVEL, wording=ABOVE, answer_tokens=16),
    "magic_single_noise": Needles(haystack=NOISE, wording=ABOVE, answer_tokens=16),
    "magic_multikey": Needles(keys=4, haystack=NOVEL, wording=ABOVE, answer_tokens=16),
    "magic_multikey_2": Needles(haystack=None, wording=ABOVE, answer_tokens=16),
    "vt": Variables(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
    "multiturn": Multiturn(Needles(keys=5, haystack=NOVEL)),
    "magic_multiturn": Multiturn(Needles(keys=5, haystack=NOVEL, wording=ABOVE, answer_tokens=16)),
    "facts": Multiturn(Needles(keys=40, haystack=Novel(has_numerals=True), wording=ABOVE, answer_tokens=16)),
    "perplexity": Perplexity(Novel(has_numerals=True)),
}

__all__ = ["NAMES"]
