"""Scenes whose labels are known because we draw them: boxes, masks, captions, depth, key points, mattes, text.

`python -m calibration.scenes render KIND FOLDER` writes images and labels; `python -m calibration.scenes train KIND`
trains the model of the kind again. `calibration/README.md` gives formats and figures.
"""
