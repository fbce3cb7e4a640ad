// From an image's pixels to the model's input, as the bundle's `preprocess` says (model/model.json):
// {resize: short side or [height, width], crop: [height, width], interpolation, mean, std, fit, crop_rounding, channel_order}.

import { cutOut, cutoutWindow } from "./points.js";
import { resize } from "./resize.js";

export const MAX_PIXELS = 64_000_000;

// Half a pixel goes to the even one.
function roundHalfEven(x) {
  const low = Math.floor(x), rest = x - low;
  if (rest !== 0.5) return Math.round(x);
  return low % 2 === 0 ? low : low + 1;
}

// [width, height] that an image is resized to.
export function resizedSize(width, height, spec) {
  if (!Array.isArray(spec.resize)) {
    const long = Math.trunc((spec.resize * Math.max(width, height)) / Math.min(width, height));
    return width <= height ? [spec.resize, long] : [long, spec.resize];
  }
  const [high, wide] = spec.resize;
  if (spec.fit === "stretch") return [wide, high];
  const ratio = Math.min(height / high, width / wide);
  return [roundHalfEven(width / ratio), roundHalfEven(height / ratio)];
}

// The start of the centre crop along a side; negative for pixels of padding.
function cropStart(side, crop, spec) {
  if (side < crop) return -Math.floor((crop - side) / 2);
  return spec.crop_rounding === "even" ? roundHalfEven((side - crop) / 2) : Math.floor((side - crop) / 2);
}

// The region of the original that the model sees, in pixels: {left, top, width, height}. Boxes and maps refer to it.
export function inputWindow(width, height, spec) {
  if (spec.fit === "topdown") return cutoutWindow(width, height, spec.crop);
  const [wide, high] = resizedSize(width, height, spec);
  return {
    left: (cropStart(wide, spec.crop[1], spec) * width) / wide,
    top: (cropStart(high, spec.crop[0], spec) * height) / high,
    width: (spec.crop[1] * width) / wide,
    height: (spec.crop[0] * height) / high,
  };
}

function cropped(image, spec) {
  const [height, width] = spec.crop, { channels } = image, data = new Uint8Array(width * height * channels);
  const left = cropStart(image.width, width, spec), top = cropStart(image.height, height, spec);
  const first = Math.max(0, left), last = Math.min(image.width, left + width);
  for (let y = Math.max(0, -top); y < height && y + top < image.height; y++) {
    const row = (y + top) * image.width;
    data.set(image.data.subarray((row + first) * channels, (row + last) * channels), (y * width + first - left) * channels);
  }
  return { width, height, channels, data };
}

// RGBA pixels without their transparency: RGB, or grey as Pillow weighs it.
export function withChannels({ width, height, data }, channels) {
  const out = new Uint8Array(width * height * channels);
  for (let i = 0, o = 0; i < data.length; i += 4, o += channels) {
    if (channels === 1) out[o] = (data[i] * 19595 + data[i + 1] * 38470 + data[i + 2] * 7471 + 0x8000) >> 16;
    else [out[o], out[o + 1], out[o + 2]] = [data[i], data[i + 1], data[i + 2]];
  }
  return { width, height, channels, data: out };
}

// {width, height, data: RGBA} -> {width, height, channels, data}: the model's input.
export function prepare(image, spec) {
  if (spec.fit === "topdown") return cutOut(withChannels(image, spec.mean.length), spec.crop);
  const [width, height] = resizedSize(image.width, image.height, spec);
  if (width * height > MAX_PIXELS) throw new Error(`The image's aspect ratio is too extreme: ${image.width} × ${image.height} pixels.`);
  return cropped(resize(withChannels(image, spec.mean.length), width, height, spec.interpolation), spec);
}

// The values of an input tensor for `batch` copies of prepared pixels, and its shape: uint8 NHWC where the graph
// normalises, else float32 NCHW.
export function toInput({ width, height, channels, data }, spec, { dtype, batch }) {
  if (dtype === "uint8") {
    const values = new Uint8Array(batch * data.length);
    for (let n = 0; n < batch; n++) values.set(data, n * data.length);
    return { values, shape: [batch, height, width, channels] };
  }
  const values = new Float32Array(batch * data.length), plane = width * height, { fround } = Math;
  const mean = spec.mean.map(fround), std = spec.std.map(fround), bgr = spec.channel_order === "bgr";
  for (let i = 0; i < values.length; i++) {
    const c = Math.floor(i / plane) % channels, place = i % plane, pixel = bgr ? channels - 1 - c : c;
    values[i] = fround(fround(data[place * channels + pixel] / 255) - mean[c]) / std[c];
  }
  return { values, shape: [batch, channels, height, width] };
}
