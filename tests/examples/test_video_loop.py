"""Frames in, answers out: every frame of a file, the newest one of a camera."""

import itertools
import json
import signal
import sys
import threading
import time
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import pytest

from tests.examples_page import load_example
from vitdeploy.runtime import Classification, Detections, load
from vitdeploy.runtime.tasks.classification import ClassScore
from vitdeploy.runtime.tasks.detection import Detection

cv2 = pytest.importorskip("cv2", reason="pip install opencv-python-headless")
SCRIPT = (sys.executable, "examples/video_loop.py", "out/digits")


@pytest.fixture(scope="module")
def example():
    return load_example("video_loop")


@pytest.fixture(scope="module")
def clip(clone):
    """What the page makes, and its frames as OpenCV decodes them, in the order of the model's channels."""
    clone.python("VideoWriter")
    capture, frames = cv2.VideoCapture(str(clone.folder / "clip.avi")), []
    while (frame := capture.read()[1]) is not None:
        frames.append(cv2.cvtColor(frame, cv2.COLOR_BGR2RGB))
    assert len(frames) > 4
    return frames


@pytest.fixture(scope="module")
def camera(clip):
    """A camera on the network, which never ends: a JPEG, a hundred times a second."""
    images = [cv2.imencode(".jpg", cv2.cvtColor(frame, cv2.COLOR_RGB2BGR))[1].tobytes() for frame in clip]

    class Camera(BaseHTTPRequestHandler):
        def do_GET(self):
            self.send_response(200)
            self.send_header("Content-Type", "multipart/x-mixed-replace; boundary=frame")
            self.end_headers()
            for image in itertools.cycle(images):
                head = f"--frame\r\nContent-Type: image/jpeg\r\nContent-Length: {len(image)}\r\n\r\n".encode()
                try:
                    self.wfile.write(head + image + b"\r\n")
                except OSError:  # nobody looks any more
                    return
                time.sleep(0.01)

        def log_message(self, *_):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Camera) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/"
        server.shutdown()
        thread.join()


def test_every_frame_of_a_file_is_answered_as_the_page_says(clone, clip):
    shown = clone.shell("examples/video_loop.py")
    lines = (clone.folder / "frames.jsonl").read_text(encoding="utf-8").splitlines()
    assert shown == [line[:110] for line in lines[:2]]
    with load(clone.folder / "out" / "digits") as predictor:
        expected = [{"frame": i, **predictor.predict(frame).to_dict()} for i, frame in enumerate(clip)]
    assert [json.loads(line) for line in lines] == expected


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_camera_is_answered_until_somebody_ends_it(clone, camera, number):
    process = clone.start(*SCRIPT, camera, "--headless")
    try:
        frames = [json.loads(process.stdout.readline())["frame"] for _ in range(5)]
        process.send_signal(number)
        told = process.communicate(timeout=20)[1]
    finally:
        process.kill()
    assert frames == sorted(set(frames))
    assert (process.returncode, "Traceback" in told) == (0, False), told
    assert "stopped: " in told


def reading():
    """Whether a camera is read on."""
    return any(thread.name == "camera" for thread in threading.enumerate())


def test_frames_of_a_camera_are_dropped_and_never_late(example, clone, clip):
    capture = cv2.VideoCapture(str(clone.folder / "clip.avi"))  # read as fast as it can be: faster than anybody looks
    with closing(example.newest_frame(capture)) as frames:
        number, first = next(frames)
        np.testing.assert_array_equal(cv2.cvtColor(first, cv2.COLOR_BGR2RGB), clip[number])
        deadline = time.monotonic() + 20
        while reading() and time.monotonic() < deadline:  # meanwhile it comes to the end
            time.sleep(0.01)
        last = len(clip) - 1
        assert [number for number, _ in frames] == ([] if number == last else [last])


def test_a_camera_that_nobody_looks_at_any_more_is_not_read_on(example, camera):
    capture = cv2.VideoCapture(camera)
    with closing(example.newest_frame(capture)) as frames:
        seen, deadline = [], time.monotonic() + 20
        for number, _ in frames:
            seen.append(number)
            if number - seen[0] > len(seen) + 4 or time.monotonic() > deadline:
                break
            time.sleep(0.1)
        assert reading()
    assert not reading()
    capture.release()
    assert seen[-1] - seen[0] > len(seen) + 4  # others were dropped


def test_answers_are_drawn(example):
    frame = np.zeros((48, 96, 3), np.uint8)
    example.draw(frame, Classification((ClassScore(7, "seven", 0.5),)))
    assert frame[:, :, 1].any() and not frame[:, :, 0].any()
    frame[:] = 0
    example.draw(frame, Detections((96, 48), (Detection(1, "", 0.5, (10.2, 20.0, 50.0, 40.0)),)))
    assert frame[20, 10, 1] == 255 and frame[40, 50, 1] == 255 and not frame[30, 30].any()


@pytest.mark.parametrize("source", ["99", "absent.avi", "examples/README.md"])
def test_what_is_no_video_is_told(clone, source):
    done = clone.run(*SCRIPT, source, "--headless")
    assert (done.returncode, "cannot be opened as a camera or a video" in done.stderr) == (2, True)


def test_a_wrong_bundle_is_told(clone, clip):
    done = clone.run(*SCRIPT[:2], "calibration", "clip.avi", "--headless")
    assert (done.returncode, "VD2002" in done.stderr) == (2, True)
