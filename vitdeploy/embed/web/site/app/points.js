// Key points: the input of a top-down model, and the decoding of its heat maps. Single precision where mmpose and
// transformers have it, so that pixels are equal to theirs.

const { fround } = Math;
const SIGMA = 0.8, LEAST = 0.001, MOST = 50, UNIT = 200, PADDING = 1.25;

// The whole image enlarged to the aspect of the input, then by a quarter: its centre and its sides, x and y.
export function cutout(width, height, [high, wide]) {
  const aspect = wide / high, box = width > aspect * height ? [width, width / aspect] : [height * aspect, height];
  return { centre: [fround(width * 0.5), fround(height * 0.5)], sides: box.map((side) => fround(fround(fround(side / UNIT) * PADDING) * UNIT)) };
}

// For each input pixel along a side: the two neighbouring image pixels and their weights; 0 outside the image.
function between(count, centre, side, length) {
  const scale = (count - 1) / side, offset = fround(scale * fround(fround(0.5 * side) - centre));
  return Array.from({ length: count }, (_, i) => {
    const at = (i - offset) / fround(scale), inside = at >= 0 && at <= length - 1, low = inside ? Math.floor(at) : 0;
    return { pixels: [low, Math.min(low + 1, length - 1)], shares: inside ? [1 - (at - low), at - low] : [0, 0] };
  });
}

// {width, height, channels, data}: the image as a top-down model sees all of it; black beyond it.
export function cutOut({ width, height, channels, data }, crop) {
  const { centre, sides } = cutout(width, height, crop), [high, wide] = crop;
  const columns = between(wide, centre[0], sides[0], width), rows = between(high, centre[1], sides[1], height);
  const out = new Uint8Array(wide * high * channels);
  for (let y = 0; y < high; y++) {
    const [above, below] = rows[y].pixels, [up, down] = rows[y].shares;
    for (let x = 0; x < wide; x++) {
      const [left, right] = columns[x].pixels, [near, far] = columns[x].shares;
      for (let c = 0; c < channels; c++) {
        const tall = (column) => data[(above * width + column) * channels + c] * up + data[(below * width + column) * channels + c] * down;
        out[(y * wide + x) * channels + c] = Math.floor(tall(left) * near + tall(right) * far + 0.5);
      }
    }
  }
  return { width: wide, height: high, channels, data: out };
}

// The part of the image that a top-down model sees: half a pixel more than from first to last centre.
export function cutoutWindow(width, height, crop) {
  const { centre, sides } = cutout(width, height, crop);
  const [wide, high] = sides.map((side, axis) => (side * crop[1 - axis]) / (crop[1 - axis] - 1));
  return { left: centre[0] + 0.5 - wide / 2, top: centre[1] + 0.5 - high / 2, width: wide, height: high };
}

// DARK's correction of a map's peak: a step of Newton's method for the logarithm of the map, which a Gaussian smooths
// first (arXiv 1910.06278, equations 7 to 9). Sides are mirrored for the Gaussian and repeated for the differences.
function moved(map, width, height, peakX, peakY, kernel) {
  const radius = kernel >> 1, steps = Array.from({ length: kernel }, (_, i) => i - radius);
  const powers = steps.map((i) => Math.exp(-0.5 * (i / SIGMA) ** 2)), total = powers.reduce((a, b) => a + b, 0);
  const weights = powers.map((each) => each / total);
  const mirrored = (at, length) => {
    while (at < 0 || at >= length) at = at < 0 ? -at - 1 : 2 * length - 1 - at;
    return at;
  };
  const inside = (at, length) => Math.min(length - 1, Math.max(0, at));
  const down = (x, y) => fround(steps.reduce((sum, i, k) => sum + map[mirrored(y + i, height) * width + x] * weights[k], 0));
  const near = (right, below) => {
    const x = inside(peakX + right, width), y = inside(peakY + below, height);
    const smooth = fround(steps.reduce((sum, i, k) => sum + down(mirrored(x + i, width), y) * weights[k], 0));
    return fround(Math.log(Math.min(MOST, Math.max(fround(LEAST), smooth))));
  };
  const sum = (...values) => values.reduce((a, b) => fround(a + b)), centre = near(0, 0);
  const dx = fround(0.5 * sum(near(1, 0), -near(-1, 0))), dy = fround(0.5 * sum(near(0, 1), -near(0, -1)));
  const xx = sum(near(1, 0), -2 * centre, near(-1, 0)) + 2 ** -23, yy = sum(near(0, 1), -2 * centre, near(0, -1)) + 2 ** -23;
  const xy = fround(0.5 * sum(near(1, 1), -near(1, 0), -near(0, 1), centre, centre, -near(-1, 0), -near(0, -1), near(-1, -1)));
  const determinant = xx * yy - xy * xy;
  return [-(yy * dx - xy * dy) / determinant, -(xx * dy - xy * dx) / determinant];
}

// [{x, y, score}] in pixels of the maps, `count` of them, [height, width] each. A map that is nowhere above 0 has no place.
function locate(maps, [count, height, width], { decoding, kernel }) {
  return Array.from({ length: count }, (_, n) => {
    const map = maps.subarray(n * height * width, (n + 1) * height * width), score = map.reduce((a, b) => Math.max(a, b));
    if (score <= 0) return { x: -1, y: -1, score };
    const best = map.indexOf(score), x = best % width, y = Math.floor(best / width);
    const [right, below] = decoding === "dark" ? moved(map, width, height, x, y, kernel) : [0, 0];
    return { x: x + right, y: y + below, score };
  });
}

// All points in pixels of the image, whose first centre is 0: [{index, label, x, y, score}]. `window` is what the input shows
// of the image. The maps of a top-down model lie from the first to the last centre of its input, others divide the window.
export function pointsOf(maps, shape, spec, post, labels, window) {
  const [, rows, columns] = shape, topdown = spec.fit === "topdown" || spec.topdown;
  const place = (at, cells, pixels, start, extent) => topdown
    ? start + (((at * (pixels - 1)) / (cells - 1) + 0.5) * extent) / pixels - 0.5
    : start + ((at + 0.5) * extent) / cells - 0.5;
  return locate(maps, shape, post).map(({ x, y, score }, index) => ({
    index,
    label: labels[index] ?? String(index),
    x: place(x, columns, spec.crop[1], window.left, window.width),
    y: place(y, rows, spec.crop[0], window.top, window.height),
    score,
  }));
}
