from pyftpdlib.authorizers import DummyAuthorizer
from pyftpdlib.handlers import FTPHandler
from pyftpdlib.servers import FTPServer


class Handler(FTPHandler):
    authorizer, timeout = DummyAuthorizer(), 3600


Handler.authorizer.add_anonymous("/srv/www")
FTPServer(("0.0.0.0", 8000), Handler).serve_forever()
