// From a model's outputs for one image to its answer. `outputs` are arrays of numbers by name, without the batch axis.

import { classAreas, classMap, depthMap, depthRange, matteMap, shareAbove } from "./maps.js";
import { pointsOf } from "./points.js";
import { inputWindow } from "./preprocess.js";

const labelOf = (index, labels) => labels[index] ?? String(index);

function softmax(logits) {
  const largest = logits.reduce((a, b) => Math.max(a, b), -Infinity);
  const exponentials = Float64Array.from(logits, (each) => Math.exp(each - largest));
  const sum = exponentials.reduce((a, b) => a + b, 0);
  return exponentials.map((each) => each / sum);
}

const sigmoid = (x) => 1 / (1 + Math.exp(-x));

// The best classes, best first: [{index, label, score}].
export function classify(logits, labels, count = 5) {
  const scores = softmax(logits);
  const best = Array.from(scores, (_, index) => index).sort((a, b) => scores[b] - scores[a]).slice(0, count);
  return best.map((index) => ({ index, label: labelOf(index, labels), score: scores[index] }));
}

// Of a model with labels of their own: all labels in their order, [{index, label, score, has}].
export function ownLabels(values, given, labels, thresholds) {
  const scores = given ? values : Array.from(values, sigmoid);
  return Array.from(scores, (score, index) => ({ index, label: labelOf(index, labels), score, has: score > (thresholds?.[index] ?? 0.5) }));
}

// The cosine of two vectors.
export function cosine(a, b) {
  const dot = (p, q) => p.reduce((sum, each, i) => sum + each * q[i], 0);
  return dot(a, b) / Math.sqrt(dot(a, a) * dot(b, b));
}

// {score, index, query} of every candidate, best first.
function candidates(outputs, post) {
  const queries = outputs.boxes.length / 4, found = [];
  if (post.scores === "given") {
    for (let q = 0; q < queries; q++) found.push({ score: outputs.scores[q], index: Number(outputs.labels[q]), query: q });
  } else if (post.scores === "softmax") {
    const count = outputs.logits.length / queries; // the last class is "no object"
    for (let q = 0; q < queries; q++) {
      const scores = softmax(outputs.logits.subarray(q * count, (q + 1) * count)).subarray(0, count - 1);
      const score = scores.reduce((a, b) => Math.max(a, b));
      found.push({ score, index: scores.indexOf(score), query: q });
    }
  } else {
    const count = outputs.logits.length / queries;
    outputs.logits.forEach((x, i) => found.push({ score: sigmoid(x), index: i % count, query: Math.floor(i / count) }));
  }
  return found.sort((a, b) => b.score - a.score).slice(0, post.top_k || queries);
}

// The objects above the threshold, best first: [{index, label, score, box: [left, top, right, bottom]}], with boxes in
// pixels of the original image of `width` x `height`.
export function detect(outputs, width, height, spec, post, labels) {
  const window = inputWindow(width, height, spec);
  const inside = (x, size) => Math.min(size, Math.max(0, x));
  return candidates(outputs, post).filter(({ score }) => score > post.threshold).map(({ score, index, query }) => {
    let [a, b, c, d] = outputs.boxes.slice(4 * query, 4 * query + 4);
    if (post.boxes === "cxcywh") [a, b, c, d] = [a - c / 2, b - d / 2, a + c / 2, b + d / 2];
    const box = [
      inside(window.left + a * window.width, width),
      inside(window.top + b * window.height, height),
      inside(window.left + c * window.width, width),
      inside(window.top + d * window.height, height),
    ];
    return { index, label: labelOf(index, labels), score, box };
  });
}

// {width, height, data: RGBA} of a picture that the model made, [channels, height, width].
export function pictureMade(values, [channels, height, width], { black, white }) {
  const plane = width * height, data = new Uint8ClampedArray(4 * plane).fill(255), { fround } = Math;
  for (let i = 0; i < plane; i++) {
    for (let c = 0; c < 3; c++) {
      const value = values[(c % channels) * plane + i], share = fround(fround(value - fround(black)) / fround(white - black));
      data[4 * i + c] = fround(Math.min(1, Math.max(0, share)) * 255); // such arrays round to the nearest, halves to even
    }
  }
  return { width, height, data };
}

// The numbers of a regression with their names and units: [{label, value, unit}].
export function measure(numbers, { units }, labels) {
  const name = (index) => (numbers.length === 1 && !labels.length ? "number" : labelOf(index, labels));
  return Array.from(numbers, (value, index) => ({ label: name(index), value, unit: units[index] ?? "" }));
}

// The vector at length 1; one of zeros stays as it is.
function direction(vector) {
  const length = Math.sqrt(vector.reduce((sum, each) => sum + each * each, 0));
  return length > 0 ? vector.map((each) => each / length) : vector;
}

// How outputs become an answer of each form (model.json), at an image of `width` x `height`.
const ANSWERS = {
  ranking: (outputs, { output, given }, { labels }) => {
    const values = outputs[output]; // the softmax of logarithms gives given scores back
    return { top: classify(given ? Float32Array.from(values, (score) => Math.log(Math.max(score, 1.17549435e-38))) : values, labels) };
  },
  labels: (outputs, { output, given, thresholds }, { labels }) => ({ scores: ownLabels(outputs[output], given, labels, thresholds) }),
  decision: (outputs, { output, given, threshold, positive }, { labels }) => {
    const [{ score, has }] = ownLabels(outputs[output], given, labels, [threshold]);
    return { yes: has, label: positive ?? (labels[0] || "yes"), score };
  },
  vector: (outputs, { output, normalised }) => ({ vector: normalised ? direction(outputs[output]) : outputs[output] }),
  numbers: (outputs, form, { labels }) => ({ numbers: measure(outputs[form.output], form, labels) }),
  boxes: (outputs, form, { width, height, preprocess, labels }) => ({ objects: detect(outputs, width, height, preprocess, form, labels) }),
  classes: (outputs, form, { width, height, preprocess, shapes, labels }) => {
    const map = classMap(outputs, shapes, width, height, preprocess, form);
    return { map, classes: classAreas(map, labels) };
  },
  depth: (outputs, form, { width, height, preprocess, shapes }) => {
    const map = depthMap(outputs, shapes, width, height, preprocess, form);
    return { map, range: depthRange(map), values: form.values };
  },
  matte: (outputs, form, { width, height, preprocess, shapes }) => {
    const map = matteMap(outputs, shapes, width, height, preprocess, form);
    return { map, share: shareAbove(map, form.threshold) };
  },
  points: (outputs, form, { width, height, preprocess, shapes, labels }) => {
    const window = inputWindow(width, height, preprocess), { output, threshold, skeleton } = form;
    return { points: pointsOf(outputs[output], shapes[output], preprocess, form, labels, window), threshold, skeleton };
  },
  picture: (outputs, form, { shapes }) => ({ picture: pictureMade(outputs[form.output], shapes[form.output], form) }),
  parts: (outputs, { parts }, at) =>
    ({ parts: parts.map(({ name, form, labels }) => ({ name, ...answerOf(outputs, form, { ...at, labels }) })) }),
};

const answerOf = (outputs, form, at) => ({ kind: form.kind, ...ANSWERS[form.kind](outputs, form, at) });

// {kind, ...}: `top` of classes that compete, `scores` of labels of their own, `yes` with its `label` and `score`, a
// `vector`, `numbers`, `objects` in boxes; `map` of every pixel, with its `classes`, its `range` of depth or the `share` that
// is foreground; `points` with their `skeleton`; the `picture` made of the image; `parts`, each such an answer with its `name`.
export function toAnswer(outputs, width, height, { form, preprocess, shapes }, labels) {
  return answerOf(outputs, form, { width, height, preprocess, shapes, labels });
}
