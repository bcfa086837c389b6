from waitress import serve

from wsgi import app

serve(app, listen="*:8000", channel_timeout=3600)
