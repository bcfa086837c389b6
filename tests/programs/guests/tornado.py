import asyncio

import tornado.web

seen = 0


class Count(tornado.web.RequestHandler):
    def get(self):
        global seen
        seen += 1
        self.write(str(seen))


async def serve():
    tornado.web.Application([("/", Count)]).listen(8000)
    await asyncio.Event().wait()


asyncio.run(serve())
