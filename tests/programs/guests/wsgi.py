"""Counts its requests."""

seen = 0


def app(environ, start_response):
    global seen
    seen += 1
    body = b"%d" % seen
    start_response("200 OK", [("Content-Type", "text/plain"), ("Content-Length", str(len(body)))])
    return [body]
