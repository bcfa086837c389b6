import asyncio

from websockets.asyncio.server import serve

seen = 0


async def again(socket):
    global seen
    async for message in socket:
        seen += 1
        await socket.send(f"{message} {seen}")


async def forever():
    async with serve(again, "0.0.0.0", 8000, ping_interval=None) as server:
        await server.serve_forever()


asyncio.run(forever())
