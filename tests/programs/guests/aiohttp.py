from aiohttp import web

seen = 0


async def count(request):
    global seen
    seen += 1
    return web.Response(text=str(seen))


app = web.Application()
app.router.add_get("/", count)
web.run_app(app, port=8000, keepalive_timeout=3600)
