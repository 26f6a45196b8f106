"""Pages for people who follow a callback URL from a mail: they show, ask, and post. No script, nothing from outside.

A GET changes nothing, since mail scanners and previews open links; the button's POST does. All text is escaped.
"""

import base64
import hashlib
from html import escape
from string import Template

from app.callbacks.schemas import Confirm

_STYLE = (
    "body{font:1.1rem/1.5 system-ui,sans-serif;max-width:34rem;margin:4rem auto;padding:0 1rem}"
    "button{font:inherit;padding:.5rem 1.5rem}"
)
_STYLE_DIGEST = base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()

HEADERS = {
    # The style is in the page and is named by its hash; forms go to where they came from.
    "content-security-policy": (
        f"default-src 'none'; style-src 'sha256-{_STYLE_DIGEST}'; form-action 'self';"
        " frame-ancestors 'none'; base-uri 'none'"
    ),
    # The address is the credential: it must not go into a log, a cache or the next page's referrer.
    "referrer-policy": "no-referrer",
    "cache-control": "no-store",
    "x-content-type-options": "nosniff",
    "x-robots-tag": "noindex, nofollow",
}

_PAGE = Template("""<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>$title</title><style>$style</style></head>
<body><h1>$title</h1>$body</body></html>
""")


def question(confirm: Confirm, *, is_open: bool) -> str:
    """The page with the wait's own text and, while the wait is open, a button that posts to the page's address."""
    text = "".join(f"<p>{escape(part)}</p>" for part in confirm.text.split("\n\n") if part.strip())
    form = f'<form method="post"><button>{escape(confirm.button)}</button></form>'
    return _page(confirm.title, text + (form if is_open else "<p>This has been answered, or is over.</p>"))


def outcome(confirm: Confirm, said: str) -> str:
    """The page after the button."""
    return _page(confirm.title, f"<p>{escape(said)}</p>")


def _page(title: str, body: str) -> str:
    return _PAGE.substitute(title=escape(title), style=_STYLE, body=body)
