// Decodes files to pixels in the browser: rotated by the EXIF orientation, without colour management, and with the colours of
// transparent pixels, as in vitdeploy's Predictor.

import { MAX_PIXELS } from "./preprocess.js";

const MAX_BYTES = 64 * 1024 * 1024;
const PNG = [0x89, 0x50, 0x4e, 0x47], END = [0x49, 0x45, 0x4e, 0x44], RIFF = [0x52, 0x49, 0x46, 0x46];

const holds = (bytes, at, expected) => expected.every((each, i) => bytes[at + i] === each);

// Browsers show truncated files in part; the answer to a partial image would be wrong.
function isWhole(bytes) {
  const view = new DataView(bytes.buffer);
  if (holds(bytes, 0, PNG)) return bytes.length > 57 && holds(bytes, pngEnd(view), END);
  if (holds(bytes, 0, [0xff, 0xd8, 0xff])) return jpegEnds(bytes, view);
  if (holds(bytes, 0, RIFF) && holds(bytes, 8, [0x57, 0x45, 0x42, 0x50])) {
    return bytes.length > 12 && view.getUint32(4, true) + 8 <= bytes.length + 1; // the last byte may be padding
  }
  throw new Error("This is not a JPEG, PNG or WebP file.");
}

// The offset of the name of the image's last chunk, or of the end of the data.
function pngEnd(view) {
  let at = 8;
  while (at + 12 <= view.byteLength && view.getUint32(at + 4) !== 0x49454e44) at += 12 + view.getUint32(at);
  return at + 4;
}

// Past the segments of the header, which may hold a whole JPEG as a thumbnail, an end of image must follow.
function jpegEnds(bytes, view) {
  let at = 2;
  while (at + 4 <= bytes.length && bytes[at] === 0xff && bytes[at + 1] !== 0xda) {
    at += bytes[at + 1] === 0xff ? 1 : 2 + view.getUint16(at + 2);
  }
  let end = bytes.length - 2;
  while (end > at && !(bytes[end] === 0xff && bytes[end + 1] === 0xd9)) end--;
  return end > at;
}

// Pixels of a bitmap, RGBA. A canvas stores premultiplied colours and loses those of transparent pixels; WebGL does not.
function pixelsOf(bitmap) {
  const { width, height } = bitmap;
  const context = new OffscreenCanvas(width, height).getContext("2d", { willReadFrequently: true });
  context.drawImage(bitmap, 0, 0);
  const data = new Uint8Array(context.getImageData(0, 0, width, height).data.buffer);
  for (let i = 3; i < data.length; i += 4) if (data[i] !== 255) return behindTransparency(bitmap);
  return data;
}

function behindTransparency(bitmap) {
  const { width, height } = bitmap;
  const gl = new OffscreenCanvas(1, 1).getContext("webgl");
  if (!gl || Math.max(width, height) > gl.getParameter(gl.MAX_TEXTURE_SIZE)) {
    throw new Error("This image has transparent pixels, which this browser cannot read exactly. Save it without transparency.");
  }
  gl.pixelStorei(gl.UNPACK_PREMULTIPLY_ALPHA_WEBGL, false);
  gl.pixelStorei(gl.UNPACK_COLORSPACE_CONVERSION_WEBGL, gl.NONE);
  gl.bindTexture(gl.TEXTURE_2D, gl.createTexture());
  gl.texImage2D(gl.TEXTURE_2D, 0, gl.RGBA, gl.RGBA, gl.UNSIGNED_BYTE, bitmap);
  gl.bindFramebuffer(gl.FRAMEBUFFER, gl.createFramebuffer());
  gl.framebufferTexture2D(gl.FRAMEBUFFER, gl.COLOR_ATTACHMENT0, gl.TEXTURE_2D, gl.getParameter(gl.TEXTURE_BINDING_2D), 0);
  const data = new Uint8Array(width * height * 4);
  gl.readPixels(0, 0, width, height, gl.RGBA, gl.UNSIGNED_BYTE, data);
  gl.getExtension("WEBGL_lose_context")?.loseContext();
  for (let i = 3; i < data.length; i += 4) data[i] = 255;
  return data;
}

// {width, height, data: RGBA without transparency} of a Blob; throws an Error with a message for the user.
export async function readImage(blob) {
  if (blob.size > MAX_BYTES) throw new Error(`The file is too large: ${Math.round(blob.size / 1e6)} MB (limit: 64 MB).`);
  if (!isWhole(new Uint8Array(await blob.arrayBuffer()))) throw new Error("The image is corrupt or truncated.");
  let bitmap;
  try {
    bitmap = await createImageBitmap(blob, { colorSpaceConversion: "none", premultiplyAlpha: "none" });
  } catch {
    throw new Error("This browser cannot decode the image.");
  }
  const { width, height } = bitmap;
  try {
    if (width * height > MAX_PIXELS) throw new Error(`The image is too large: ${width} × ${height} pixels.`);
    return { width, height, data: pixelsOf(bitmap) };
  } finally {
    bitmap.close();
  }
}

// RGBA of prepared pixels, for display.
export function toRgba({ width, height, channels, data }) {
  const out = new Uint8Array(width * height * 4).fill(255);
  for (let i = 0; i < width * height; i++) {
    for (let c = 0; c < 3; c++) out[4 * i + c] = data[i * channels + (channels === 1 ? 0 : c)];
  }
  return { width, height, data: out };
}
