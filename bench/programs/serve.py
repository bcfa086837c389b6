"""The servers in Python that bench/hibernate measures, as functions of a serverless platform are: one request, one piece of
work of always the same result. `serve.py PORT WORK [FILE]` serves; `serve.py once WORK [FILE]` does it once and prints the
answer, which is how the bench knows what is right.

hello      nothing
float      sine, cosine and square root of so many numbers (FunctionBench, float_operation)
image      transformations of a picture by Pillow (FunctionBench, image_processing)
video      a clip to grey by OpenCV (FunctionBench, video_processing)"""

import hashlib
import http.server
import sys

NUMBERS = 20_000


def hello(_):
    return "hello"


def float_arithmetic(_):
    import math

    total = 0.0
    for i in range(NUMBERS):
        total += math.sin(i) + math.cos(i) + math.sqrt(i)
    return f"{total:.6f}"


def image(path):
    from PIL import Image, ImageFilter

    digest = hashlib.sha256()
    with Image.open(path) as picture:
        flips = [picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT), picture.transpose(Image.Transpose.FLIP_TOP_BOTTOM)]
        turned = [picture.transpose(turn) for turn in (Image.Transpose.ROTATE_90, Image.Transpose.ROTATE_180)]
        filtered = [picture.filter(f) for f in (ImageFilter.BLUR, ImageFilter.CONTOUR, ImageFilter.SHARPEN)]
        small = picture.copy()
        small.thumbnail((128, 128))
        for result in (*flips, *turned, *filtered, picture.convert("L"), small):
            digest.update(result.tobytes())
    return digest.hexdigest()


FRAMES = []  # decoded ones; kept, as a function that is called often keeps its buffers


def video(path):
    import cv2

    capture, digest, count = cv2.VideoCapture(path), hashlib.sha256(), 0
    while True:
        read, frame = capture.read(FRAMES[count] if count < len(FRAMES) else None)
        if not read:
            break
        if count == len(FRAMES):
            FRAMES.append(frame)
        digest.update(cv2.cvtColor(frame, cv2.COLOR_BGR2GRAY))
        count += 1
    capture.release()
    return f"{count} {digest.hexdigest()}"


WORKS = {"hello": hello, "float": float_arithmetic, "image": image, "video": video}


def main():
    where, work, path = sys.argv[1], WORKS[sys.argv[2]], sys.argv[3] if len(sys.argv) > 3 else None
    if where == "once":
        print(work(path))
        return

    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self):
            answer = work(path).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, *words):
            pass

    http.server.HTTPServer(("", int(where)), Handler).serve_forever()


main()
