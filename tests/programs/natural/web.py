"""The same page by WSGI (`application`) and ASGI (`app`); that of /after/N comes after N seconds."""

import asyncio
import time


def seconds(path):
    return float(path.removeprefix("/after/")) if path.startswith("/after/") else 0


def application(environ, start_response):
    body = b"natural\n"
    time.sleep(seconds(environ["PATH_INFO"]))
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]


async def app(scope, receive, send):
    assert scope["type"] == "http"
    await asyncio.sleep(seconds(scope["path"]))
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"8")]})
    await send({"type": "http.response.body", "body": b"natural\n"})
