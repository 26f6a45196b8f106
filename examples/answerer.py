"""Stands in for another system: takes a request, and calls back with the answer when it has one.

Start it with `python answerer.py`; it prints its URL. It knows nothing of jobs: all it is given is a callback URL.
"""

import json
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen


def review(path: str) -> dict[str, int]:
    """The answer, which takes this system a while to find."""
    time.sleep(random.uniform(0.5, 2.0))
    lines = Path(path).read_bytes().splitlines()
    return {"lines": len(lines), "longest_line": max(map(len, lines), default=0)}


def answer(callback_url: str, path: str) -> None:
    """Call back until it is heard: a repeat of the same answer is safe."""
    body = json.dumps(review(path)).encode()
    while True:
        try:
            with urlopen(Request(callback_url, body, {"Content-Type": "application/json"}), timeout=30):
                return
        except HTTPError as error:
            if error.code not in (429, 503):
                print(f"nobody waits for the review of {path} any more: {error}", flush=True)
                return
        except OSError:
            pass  # The service is away for a moment.
        time.sleep(1)


class Inbox(BaseHTTPRequestHandler):
    """POST {"callback_url": …, "path": …} is accepted at once and answered later."""

    def do_POST(self) -> None:
        """Accept a request."""
        wanted = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        threading.Thread(target=answer, kwargs=wanted, daemon=True).start()
        self.send_response(202)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(b"{}")

    def log_message(self, *_: object) -> None:
        """Say nothing of each request."""


if __name__ == "__main__":
    server = ThreadingHTTPServer(("127.0.0.1", 0), Inbox)
    print(f"http://127.0.0.1:{server.server_port}/", flush=True)
    server.serve_forever()
