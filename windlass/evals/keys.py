"""Keys and values to hide in a text: nothing else in it looks like them."""

import random
import uuid
from collections.abc import Callable

_ADJECTIVES = (
    "amber ancient bitter bold brave brisk broken calm chewy clever copper curious distant dusty eager early "
    "elegant famous fierce gentle gloomy golden happy hidden hollow honest humble icy jolly keen kind lively loyal "
    "mellow merry misty modest narrow noble odd patient polite proud quiet rapid restless rusty scarlet sharp shy "
    "silent silver sleepy solid spicy sturdy tender tidy velvet vivid warm wild wise young"
)
_NOUNS = (
    "acorn amazon anchor apple badger barrel basket bottle bridge button cactus camera candle canyon carpet castle "
    "cherry cottage desert dragon eagle engine falcon feather forest garden guitar hammer harbor helmet island jacket "
    "kettle ladder lantern letter magnet market meadow mirror needle orchard otter paddle pebble pencil pepper pillow "
    "quarry ribbon river saddle shovel teapot temple ticket tiger tunnel turnip valley violin wagon walnut window"
)
ADJECTIVES, NOUNS = _ADJECTIVES.split(), _NOUNS.split()
PAIRS = len(ADJECTIVES) * len(NOUNS)
LOWER = "abcdefghijklmnopqrstuvwxyz"


def pair(draw: random.Random) -> str:
    """Two words: `"quiet-river"`."""
    return f"{draw.choice(ADJECTIVES)}-{draw.choice(NOUNS)}"


def triple(draw: random.Random) -> str:
    """Three words with capitals: `"Chewy-Tiger-Amazon"`."""
    return "-".join((draw.choice(ADJECTIVES), *draw.sample(NOUNS, 2))).title()


def number(draw: random.Random) -> str:
    """Seven digits, the first not 0."""
    return str(draw.randrange(10**6, 10**7))


def uuid4(draw: random.Random) -> str:
    """A random UUID."""
    return str(uuid.UUID(int=draw.getrandbits(128), version=4))


def letters(draw: random.Random, count: int) -> str:
    """So many random small letters."""
    return "".join(draw.choices(LOWER, k=count))


def distinct(draw: random.Random, make: Callable[[random.Random], str], count: int) -> list[str]:
    """`count` different ones; the first of them are the same for any count."""
    found: dict[str, None] = {}
    while len(found) < count:
        found[make(draw)] = None
    return list(found)
