"""Makes what serve.py works on, the same each time: `media.py image FILE BYTES` a JPEG of about that size, `media.py video
FILE FRAMES` a clip of 640 by 480 (motion JPEG)."""

import random
import sys


def image(path, size):
    from PIL import Image

    pick = random.Random(4)
    side = 200
    while True:
        # Noise, smoothed: it compresses about as badly as a photograph.
        noise = Image.frombytes("RGB", (side // 2, side * 3 // 8), pick.randbytes(side // 2 * (side * 3 // 8) * 3))
        noise.resize((side, side * 3 // 4), Image.Resampling.BICUBIC).save(path, "JPEG", quality=90)
        with open(path, "rb") as written:
            got = len(written.read())
        if got >= size:
            return
        side = max(side + 8, int(side * (size / got) ** 0.5))


def video(path, frames):
    import cv2
    import numpy

    clip = cv2.VideoWriter(path, cv2.VideoWriter_fourcc(*"MJPG"), 25, (640, 480))
    if not clip.isOpened():
        sys.exit("OpenCV cannot write motion JPEG")
    ramp = numpy.add.outer(numpy.arange(480), numpy.arange(640))
    for i in range(frames):
        clip.write(numpy.stack([ramp + 3 * i, 2 * ramp - i, ramp // 2 + 7 * i], axis=2).astype(numpy.uint8))
    clip.release()


{"image": image, "video": video}[sys.argv[1]](sys.argv[2], int(sys.argv[3]))
