from flask import Flask
from waitress import serve

app, seen = Flask("app"), [0]


@app.get("/")
def count():
    seen[0] += 1
    return str(seen[0])


serve(app, listen="*:8000", channel_timeout=3600)
