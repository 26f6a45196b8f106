"""The floor: a bare application that reads its body and gives it back. What HTTP itself costs on this server."""

from typing import Any


async def app(scope: Any, receive: Any, send: Any) -> None:
    """Answer any request with its own body."""
    if scope["type"] != "http":
        return
    body = b""
    while True:
        message = await receive()
        body += message.get("body", b"")
        if not message.get("more_body"):
            break
    headers = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(body))]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})
