// A drawing pad, and the conversion of drawings to the model's pixels. `form` (model/model.json) is the style of the model's
// images, as measured on the golden ones: {light: ink is lighter than the paper; height, width: of the ink; stroke: of the pen,
// all as shares of the frame; detail: [rows, columns], the resolution before enlargement}.

import { resize } from "./resize.js";

const GRAIN = 8; // oversampling factor

function trace(context, strokes, place, thickness) {
  Object.assign(context, { lineCap: "round", lineJoin: "round", lineWidth: thickness });
  for (const stroke of strokes) {
    context.beginPath();
    stroke.map(place).forEach(([x, y], i) => (i ? context.lineTo(x, y) : context.moveTo(x, y)));
    if (stroke.length === 1) context.lineTo(...place(stroke[0])); // a dot
    context.stroke();
  }
}

// Maps points so that the ink fills the height of the model's images, but not more than their width, with the aspect kept. The
// pen is as thick as in those images.
function placer(strokes, form, width, height) {
  const points = strokes.flat(), xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
  const [left, right, top, bottom] = [Math.min(...xs), Math.max(...xs), Math.min(...ys), Math.max(...ys)];
  const thickness = form.stroke * Math.min(width, height);
  const room = (part, side) => Math.max(1, part * side - thickness);
  const down = room(form.height, height) / Math.max(bottom - top, 1e-6);
  // A short, flat stroke is not enlarged to the whole frame.
  const across = Math.min(down, room(form.width, width) / Math.max(right - left, 1e-6));
  const flat = bottom - top < 0.2 * (right - left);
  const [dx, dy] = flat ? [across, across] : [across, down];
  const place = ([x, y]) => [width / 2 + (x - (left + right) / 2) * dx, height / 2 + (y - (top + bottom) / 2) * dy];
  return { place, thickness };
}

// Ink in RGBA squares as grey values [rows * columns], scaled so that the maximum is full ink: a thin stroke between two squares
// would be pale in both.
function averaged(data, columns, rows, light) {
  const ink = new Float64Array(rows * columns);
  for (let y = 0; y < rows; y++) {
    for (let x = 0; x < columns; x++) {
      let sum = 0;
      for (let j = 0; j < GRAIN; j++) {
        for (let i = 0; i < GRAIN; i++) sum += data[4 * ((y * GRAIN + j) * columns * GRAIN + x * GRAIN + i)];
      }
      ink[y * columns + x] = sum;
    }
  }
  const most = ink.reduce((a, b) => Math.max(a, b), 1);
  return Uint8Array.from(ink, (each) => Math.round(255 * (light ? each / most : 1 - each / most)));
}

// Strokes, lists of [x, y] in any unit, as prepared pixels {width, height, channels: 1, data}.
export function toPixels(strokes, form, spec) {
  const [height, width] = spec.crop, [rows, columns] = form.detail;
  const canvas = new OffscreenCanvas(columns * GRAIN, rows * GRAIN);
  const context = canvas.getContext("2d", { willReadFrequently: true });
  context.fillRect(0, 0, canvas.width, canvas.height);
  context.strokeStyle = "#fff";
  const { place, thickness } = placer(strokes, form, canvas.width, canvas.height);
  trace(context, strokes, place, thickness);
  const data = averaged(context.getImageData(0, 0, canvas.width, canvas.height).data, columns, rows, form.light);
  return resize({ width: columns, height: rows, channels: 1, data }, width, height, spec.interpolation);
}

// Drawing on `canvas` with mouse, pen or finger; `changed(strokes)` is called after drawing or clearing.
export class Pad {
  constructor(canvas, form, changed) {
    Object.assign(this, { canvas, form, changed, strokes: [], pointer: null });
    canvas.addEventListener("pointerdown", (event) => this.#down(event));
    canvas.addEventListener("pointermove", (event) => this.#move(event));
    for (const end of ["pointerup", "pointercancel"]) canvas.addEventListener(end, (event) => this.#up(event));
    this.draw();
  }

  clear() {
    this.strokes = [];
    this.draw();
    this.changed(this.strokes);
  }

  draw() {
    const { canvas, form } = this, context = canvas.getContext("2d"), [paper, ink] = form.light ? ["#0d0f12", "#fff"] : ["#fff", "#000"];
    context.fillStyle = paper;
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.strokeStyle = ink;
    const size = [canvas.width, canvas.height];
    trace(context, this.strokes, ([x, y]) => [x * size[0], y * size[1]], 0.07 * Math.min(...size));
  }

  #point(event) {
    const box = this.canvas.getBoundingClientRect();
    return [(event.clientX - box.left) / box.width, (event.clientY - box.top) / box.height];
  }

  #down(event) {
    if (this.pointer !== null || event.button > 0) return;
    this.pointer = event.pointerId;
    this.canvas.setPointerCapture(event.pointerId);
    this.strokes.push([this.#point(event)]);
    this.draw();
  }

  #move(event) {
    if (event.pointerId !== this.pointer) return;
    for (const each of event.getCoalescedEvents?.() ?? []) this.strokes.at(-1).push(this.#point(each));
    this.strokes.at(-1).push(this.#point(event));
    this.draw();
  }

  #up(event) {
    if (event.pointerId !== this.pointer) return;
    this.pointer = null;
    this.changed(this.strokes);
  }
}
