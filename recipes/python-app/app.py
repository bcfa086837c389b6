"""Notes: POST /notes adds one, GET /notes gives them all."""

import json
import os
import sqlite3
from wsgiref.simple_server import make_server

database = sqlite3.connect(os.environ["DATABASE"])
database.execute("CREATE TABLE IF NOT EXISTS notes (id INTEGER PRIMARY KEY, text TEXT NOT NULL)")


def app(environ, start_response):
    if environ["PATH_INFO"] != "/notes":
        start_response("404 Not Found", [("Content-Type", "text/plain")])
        return [b"not here\n"]
    if environ["REQUEST_METHOD"] == "POST":
        text = environ["wsgi.input"].read(int(environ.get("CONTENT_LENGTH") or 0)).decode()
        with database:
            database.execute("INSERT INTO notes (text) VALUES (?)", (text,))
    notes = [text for (text,) in database.execute("SELECT text FROM notes ORDER BY id")]
    start_response("200 OK", [("Content-Type", "application/json")])
    return [json.dumps(notes).encode()]


with make_server("", 8000, app) as server:
    server.serve_forever()
