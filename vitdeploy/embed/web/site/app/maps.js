// From a model's maps, which have cells, to a value for every pixel of the image: classes, depth or a matte. `outputs` are arrays of
// numbers by name, `shapes` their shapes, both without the batch axis.

import { inputWindow } from "./preprocess.js";

export const NONE = -1; // the class outside the model's input
const CUBIC = -0.75; // PyTorch's (Keys 1981, equation 4)

// For the pixels of an image side that the model's input shows, from `first` on: the cells that each lies between, and their
// weights. Linear or cubic, without antialiasing, as PyTorch's interpolate.
function samples(length, start, extent, count, cubic = false) {
  const found = { first: 0, cells: [], weights: [] };
  for (let pixel = 0; pixel < length; pixel++) {
    const centre = pixel + 0.5;
    if (centre < start || centre > start + extent) continue;
    if (!found.cells.length) found.first = pixel;
    let position = ((centre - start) * count) / extent - 0.5;
    if (!cubic) position = Math.min(count - 1, Math.max(0, position));
    const low = Math.floor(position), inside = (cell) => Math.min(count - 1, Math.max(0, cell));
    if (cubic) {
      const cells = [low - 1, low, low + 1, low + 2];
      found.cells.push(cells.map(inside));
      found.weights.push(cells.map((cell) => {
        const d = Math.abs(position - cell);
        return d <= 1 ? ((CUBIC + 2) * d - (CUBIC + 3)) * d * d + 1 : CUBIC * (((d - 5) * d + 8) * d - 4);
      }));
    } else {
      found.cells.push([low, inside(low + 1)]);
      found.weights.push([1 - (position - low), position - low]);
    }
  }
  return found;
}

// One map, from `at` in `values`, interpolated at the pixels of one image row.
function sampleRow(values, at, width, rows, row, columns) {
  const line = new Float64Array(width);
  rows.cells[row].forEach((cell, i) => {
    const start = at + cell * width, weight = rows.weights[row][i];
    for (let x = 0; x < width; x++) line[x] += values[start + x] * weight;
  });
  return Float64Array.from(columns.cells, (cells, x) => cells.reduce((sum, cell, i) => sum + line[cell] * columns.weights[x][i], 0));
}

function grid(width, height, spec, rows, columns, cubic) {
  const window = inputWindow(width, height, spec);
  return [samples(height, window.top, window.height, rows, cubic), samples(width, window.left, window.width, columns, cubic)];
}

function enlarged(values, count, [rows, columns], [height, width]) {
  const down = samples(height, 0, height, rows), across = samples(width, 0, width, columns);
  const out = new Float32Array(count * height * width);
  for (let n = 0; n < count; n++) {
    for (let y = 0; y < height; y++) out.set(sampleRow(values, n * rows * columns, columns, down, y, across), (n * height + y) * width);
  }
  return out;
}

// {scores, shape}: of the classes, [classes, height, width].
function classScores(outputs, shapes, post) {
  if (post.maps === "logits") return { scores: outputs.logits, shape: shapes.logits };
  const [queries, ...own] = shapes.masks, count = shapes.class_logits[1]; // the last column is "no object"
  const size = post.mask_size ?? own, cells = size[0] * size[1];
  const masks = Float32Array.from(post.mask_size ? enlarged(outputs.masks, queries, own, size) : outputs.masks, (x) => 1 / (1 + Math.exp(-x)));
  const scores = new Float32Array((count - 1) * cells);
  for (let q = 0; q < queries; q++) {
    const row = outputs.class_logits.subarray(q * count, (q + 1) * count), largest = row.reduce((a, b) => Math.max(a, b));
    const powers = Float64Array.from(row, (x) => Math.exp(x - largest)), sum = powers.reduce((a, b) => a + b, 0);
    for (let c = 0; c < count - 1; c++) {
      for (let i = 0; i < cells; i++) scores[c * cells + i] += (powers[c] / sum) * masks[q * cells + i];
    }
  }
  return { scores, shape: [count - 1, ...size] };
}

// Int16Array [height, width] of classes.
export function classMap(outputs, shapes, width, height, spec, post) {
  const { scores, shape: [count, high, wide] } = classScores(outputs, shapes, post);
  const [rows, columns] = grid(width, height, spec, high, wide);
  const found = new Int16Array(width * height).fill(NONE);
  for (let y = 0; y < rows.cells.length; y++) {
    const best = new Float64Array(columns.cells.length).fill(-Infinity), at = (rows.first + y) * width + columns.first;
    for (let c = 0; c < count; c++) {
      sampleRow(scores, c * high * wide, wide, rows, y, columns).forEach((score, x) => {
        if (score > best[x]) [best[x], found[at + x]] = [score, c];
      });
    }
  }
  return found;
}

// The classes of a map, the largest first: [{index, label, score: share of the image}].
export function classAreas(map, labels) {
  const areas = new Map();
  for (const index of map) if (index !== NONE) areas.set(index, (areas.get(index) ?? 0) + 1);
  return [...areas].sort((a, b) => b[1] - a[1] || a[0] - b[0])
    .map(([index, area]) => ({ index, label: labels[index] ?? String(index), score: area / map.length }));
}

// Float32Array [height, width]; NaN outside the model's input.
export function depthMap(outputs, shapes, width, height, spec, { output, resize }) {
  return atPixels(outputs[output], shapes[output], width, height, spec, resize === "bicubic");
}

function atPixels(values, shape, width, height, spec, cubic = false) {
  const [high, wide] = shape.slice(-2), [rows, columns] = grid(width, height, spec, high, wide, cubic);
  const found = new Float32Array(width * height).fill(NaN);
  for (let y = 0; y < rows.cells.length; y++) {
    found.set(sampleRow(values, 0, wide, rows, y, columns), (rows.first + y) * width + columns.first);
  }
  return found;
}

// Float32Array [height, width] of 0..1; NaN outside the model's input.
export function matteMap(outputs, shapes, width, height, spec, { output, alpha, enlarge }) {
  const sigmoid = (x) => 1 / (1 + Math.exp(-x)), inside = (x) => Math.min(1, Math.max(0, x)), late = enlarge === "logits";
  const values = late ? outputs[output] : Float64Array.from(outputs[output], alpha === "sigmoid" ? sigmoid : inside);
  const found = atPixels(values, shapes[output], width, height, spec);
  return late ? found.map(sigmoid) : found;
}

// The share of a map that is above a threshold.
export const shareAbove = (map, threshold) => map.reduce((sum, each) => sum + (each > threshold), 0) / map.length;

// [least, median, largest] of what is known of a map.
export function depthRange(map) {
  const known = map.filter(Number.isFinite).sort(), half = known.length >> 1;
  return [known[0], known.length % 2 ? known[half] : (known[half - 1] + known[half]) / 2, known.at(-1)];
}

// The colour of a class: that of PASCAL VOC's maps, whose black is left out.
export function colourOf(index) {
  const colour = [0, 0, 0];
  for (let bit = 0; bit < 8; bit++) {
    for (let channel = 0; channel < 3; channel++) colour[channel] |= (((index + 1) >> (3 * bit + channel)) & 1) << (7 - bit);
  }
  return colour;
}

// RGBA over the image: classes in their colours; depth, light is near; of a matte white where there is no foreground.
export function pictureOf(answer) {
  const { map, kind } = answer, data = new Uint8ClampedArray(4 * map.length);
  if (kind === "classes") {
    map.forEach((index, i) => { if (index !== NONE) data.set([...colourOf(index), 140], 4 * i); });
    return data;
  }
  if (kind === "matte") {
    map.forEach((alpha, i) => data.set([255, 255, 255, 255 * (1 - (alpha || 0))], 4 * i));
    return data;
  }
  const [low, , high] = answer.range;
  map.forEach((value, i) => {
    const share = (value - low) / (high - low || 1), near = answer.values === "metric" ? 1 - share : share;
    if (Number.isFinite(value)) data.set([255 * Math.min(1, 1.6 * near), 255 * near ** 1.5, 255 * (0.15 + 0.6 * near ** 3), 255], 4 * i);
  });
  return data;
}
