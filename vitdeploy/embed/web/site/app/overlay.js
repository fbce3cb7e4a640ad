// Draws an image on a canvas, with an attention map, a class map or detected objects on top.

const SMALL = 128; // images up to this side are shown with their pixels as squares

function canvasOf({ width, height, data }) {
  const canvas = new OffscreenCanvas(width, height);
  canvas.getContext("2d").putImageData(new ImageData(new Uint8ClampedArray(data), width, height), 0, 0);
  return canvas;
}

// The colour of a map's value from 0 to 1: transparent, then orange, then light.
function glow(share) {
  const bright = Math.max(0, (share - 0.6) / 0.4);
  return [255, 120 + 110 * bright, 10 + 130 * bright, 215 * Math.min(1, share * 1.15)];
}

function heat({ rows, columns, values }) {
  const [least, most] = [Math.min(...values), Math.max(...values)], data = new Uint8ClampedArray(rows * columns * 4);
  values.forEach((each, i) => data.set(glow((each - least) / (most - least || 1)), 4 * i));
  return canvasOf({ width: columns, height: rows, data });
}

function drawBoxes(context, objects, scale) {
  context.font = "600 13px system-ui, sans-serif";
  context.lineWidth = 2;
  for (const { label, score, box: [left, top, right, bottom] } of [...objects].reverse()) {
    const x = left * scale, y = top * scale, text = `${label} ${Math.round(100 * score)} %`;
    context.strokeStyle = "#ff8a1c";
    context.strokeRect(x + 1, y + 1, (right - left) * scale - 2, (bottom - top) * scale - 2);
    const width = context.measureText(text).width + 10, above = Math.max(0, y - 20);
    context.fillStyle = "#1a1f26";
    context.fillRect(x, above, width, 20);
    context.fillStyle = "#ffffff";
    context.fillText(text, x + 5, above + 14);
  }
}

// The visible points, and the lines between visible points. A pixel's centre is half a pixel from its corner.
function drawPoints(context, { points, threshold, skeleton }, scale) {
  const at = ({ x, y }) => [(x + 0.5) * scale, (y + 0.5) * scale], shown = points.filter(({ score }) => score >= threshold);
  const places = new Map(shown.map((point) => [point.index, at(point)]));
  context.lineWidth = 3;
  context.strokeStyle = "#009e73";
  for (const [a, b] of skeleton) {
    if (!places.has(a) || !places.has(b)) continue;
    context.beginPath();
    context.moveTo(...places.get(a));
    context.lineTo(...places.get(b));
    context.stroke();
  }
  context.fillStyle = "#e69f00";
  for (const [x, y] of places.values()) {
    context.beginPath();
    context.arc(x, y, 4, 0, 2 * Math.PI);
    context.fill();
  }
}

// Fill `canvas` with the image {width, height, data: RGBA}, and with `picture`, RGBA of the same size, over it. `map` is {rows, columns, values} over `window`, the part of
// the image that the model sees; what it does not see is shaded. `objects` as `answers.detect` gives them, `pose` an answer
// with points.
export function show(canvas, image, { window, map = null, objects = [], picture = null, pose = null }, size = 720) {
  const small = Math.max(image.width, image.height) <= SMALL;
  const scale = small ? Math.max(1, Math.floor(size / Math.max(image.width, image.height))) : Math.min(1.5, size / Math.max(image.width, image.height));
  canvas.width = Math.max(1, Math.round(image.width * scale));
  canvas.height = Math.max(1, Math.round(image.height * scale));
  const context = canvas.getContext("2d");
  context.imageSmoothingEnabled = !small;
  context.imageSmoothingQuality = "high";
  context.drawImage(canvasOf(image), 0, 0, canvas.width, canvas.height);
  if (picture) context.drawImage(canvasOf({ ...image, data: picture }), 0, 0, canvas.width, canvas.height);
  const [left, top, width, height] = [window.left, window.top, window.width, window.height].map((each) => each * scale);
  if (map) {
    context.imageSmoothingEnabled = true;
    context.drawImage(heat(map), left, top, width, height);
  }
  context.fillStyle = "rgb(20 23 27 / 0.55)";
  context.beginPath();
  context.rect(0, 0, canvas.width, canvas.height);
  context.rect(left, top, width, height);
  context.fill("evenodd");
  drawBoxes(context, objects, scale);
  if (pose) drawPoints(context, pose, scale);
}
