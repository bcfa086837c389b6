"""Counts its requests."""

seen = 0


async def app(scope, receive, send):
    global seen
    if scope["type"] != "http":
        return
    seen += 1
    body = b"%d" % seen
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})
