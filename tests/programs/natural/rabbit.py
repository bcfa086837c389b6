"""A client of RabbitMQ: one connection that stays, a message there and back every so often.

Arguments: port, pause, seconds in all."""

import sys
import time

import pika

port, pause, seconds = int(sys.argv[1]), float(sys.argv[2]), float(sys.argv[3])
connection = pika.BlockingConnection(pika.ConnectionParameters("127.0.0.1", port))
channel = connection.channel()
channel.queue_declare("natural", exclusive=True)
end = time.monotonic() + seconds
while time.monotonic() < end:
    began = time.monotonic()
    channel.basic_publish("", "natural", b"there and back")
    _, _, body = next(channel.consume("natural", auto_ack=True, inactivity_timeout=30))
    print(f"answered {time.monotonic() - began:.3f} {body!r}", flush=True)
    connection.sleep(pause)
connection.close()
