from cheroot.wsgi import Server

from wsgi import app

Server(("0.0.0.0", 8000), app, timeout=3600).start()
