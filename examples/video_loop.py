"""A camera or a video file, answered frame by frame.

    python examples/video_loop.py out/digits 0                          # camera 0, in a window; q ends it
    python examples/video_loop.py out/digits clip.avi --headless        # a line of JSON for each frame

Every frame of a file is answered, several in flight. For a camera (a number, or an address such as rtsp://...), only
the newest frame is answered and the others are dropped, so answers never lag behind. Ctrl+C and SIGTERM end it.
"""

import argparse
import json
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import closing

import cv2
import numpy as np

from vitdeploy.errors import VitdeployError
from vitdeploy.runtime import Classification, Detections, Result, load

GREEN = (0, 255, 0)
Frame = tuple[int, np.ndarray]  # its number in the source, and BGR pixels [height, width, 3]


def every_frame(capture: cv2.VideoCapture) -> Iterator[Frame]:
    number = 0
    while (frame := capture.read()[1]) is not None:
        yield number, frame
        number += 1


def newest_frame(capture: cv2.VideoCapture) -> Iterator[Frame]:
    """A thread keeps reading; a frame that is not taken is replaced by the next one."""
    newest: deque[Frame] = deque(maxlen=1)
    changed, ended, stop = threading.Condition(), threading.Event(), threading.Event()

    def read_on() -> None:
        for each in every_frame(capture):
            with changed:
                newest.append(each)
                changed.notify()
            if stop.is_set():
                return
        with changed:
            ended.set()
            changed.notify()

    reader = threading.Thread(target=read_on, name="camera")
    reader.start()
    try:
        while True:
            with changed:
                changed.wait_for(lambda: newest or ended.is_set())
                if not newest:
                    return
                frame = newest.popleft()
            yield frame
    finally:
        stop.set()
        reader.join()


def draw(frame: np.ndarray, answer: Result) -> None:
    if isinstance(answer, Classification):
        text = f"{answer.label} {answer.score:.2f}"
        cv2.putText(frame, text, (8, 28), cv2.FONT_HERSHEY_SIMPLEX, 0.8, GREEN, 2)
    elif isinstance(answer, Detections):
        for found in answer.objects:
            left, top, right, bottom = map(round, found.box)
            cv2.rectangle(frame, (left, top), (right, bottom), GREEN, 2)
            cv2.putText(frame, found.label, (left, top - 4), cv2.FONT_HERSHEY_SIMPLEX, 0.6, GREEN, 2)


def main() -> int:
    parser = argparse.ArgumentParser(description="Answers for the frames of a camera or a video file.")
    parser.add_argument("bundle", help="folder of a bundle, as vitdeploy run makes it")
    parser.add_argument("source", help="number of a camera, address of a stream, or a video file")
    parser.add_argument("--headless", action="store_true", help="no window: print the answers as lines of JSON")
    options = parser.parse_args()
    live = options.source.isdecimal() or "://" in options.source
    capture = cv2.VideoCapture(int(options.source) if options.source.isdecimal() else options.source)
    if not capture.isOpened():
        parser.error(f"{options.source} cannot be opened as a camera or a video")
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    frames = newest_frame(capture) if live else every_frame(capture)
    taken: deque[Frame] = deque()  # in flight

    def images() -> Iterator[np.ndarray]:
        for number, frame in frames:
            taken.append((number, frame))
            yield cv2.cvtColor(frame, cv2.COLOR_BGR2RGB)  # OpenCV's channel order is not the model's

    answered, start, ended = 0, time.monotonic(), "the source ended"
    try:
        with load(options.bundle) as predictor, closing(frames):
            # 1: the answer to a live frame does not wait for the next frame.
            for answer in predictor.stream(images(), in_flight=1 if live else 4):
                number, frame = taken.popleft()
                answered += 1
                if options.headless:
                    print(json.dumps({"frame": number, **answer.to_dict()}), flush=live)
                    continue
                draw(frame, answer)
                cv2.imshow("vitdeploy", frame)
                if cv2.waitKey(1) == ord("q"):
                    ended = "stopped"
                    break
    except KeyboardInterrupt:
        ended = "stopped"
    except VitdeployError as error:
        print(error, file=sys.stderr)
        return error.exit_code
    finally:
        capture.release()
    rate = answered / (time.monotonic() - start)
    print(f"{ended}: {answered} frames answered, {rate:.1f} a second", file=sys.stderr)
    return 1 if live and ended != "stopped" else 0  # a camera does not end by itself


if __name__ == "__main__":
    sys.exit(main())
