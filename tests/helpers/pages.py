"""The page in a browser, and its slider."""

from tests.helpers.chromium import Browser

SHOWN = "document.body.dataset.step !== undefined"


def seek(browser: Browser, step: int) -> None:
    """Move the slider, as a hand does."""
    browser.run(
        f"(() => {{ const s = document.getElementById('step'); s.value = {step};"
        " s.dispatchEvent(new Event('input')) })()"
    )
    browser.until(f"document.body.dataset.step === '{step}'")


def kinds(browser: Browser) -> dict[int, list[str]]:
    """The classes of the tokens on the screen."""
    found = browser.run(
        "[...document.querySelectorAll('#text span')].map((each) => [Number(each.dataset.token), each.className])"
    )
    return {token: kind.split() for token, kind in found}
