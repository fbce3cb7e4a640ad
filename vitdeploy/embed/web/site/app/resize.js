// Resizing as in Pillow 13, bit-exact: filters widen when an image shrinks, weights have 22 fractional bits, and values
// between the two passes are integers. An image is {width, height, channels, data: Uint8Array
// [height, width, channels]}.

const sinc = (x) => (x === 0 ? 1 : Math.sin(x * Math.PI) / (x * Math.PI));

function bicubic(x) {
  const t = Math.abs(x), a = -0.5; // Keys' cubic convolution
  if (t < 1) return ((a + 2) * t - (a + 3)) * t * t + 1;
  return t < 2 ? (((t - 5) * t + 8) * t - 4) * a : 0;
}

const FILTERS = {
  bilinear: { support: 1, weight: (x) => Math.max(0, 1 - Math.abs(x)) },
  bicubic: { support: 2, weight: bicubic },
  lanczos: { support: 3, weight: (x) => (x >= -3 && x < 3 ? sinc(x) * sinc(x / 3) : 0) },
};
const BITS = 22;

// The input pixels of each output pixel and their weights: [{first, weights: Int32Array}].
function taps(from, to, { support, weight }) {
  const scale = from / to, stretch = Math.max(scale, 1), reach = support * stretch;
  return Array.from({ length: to }, (_, i) => {
    const centre = (i + 0.5) * scale;
    const first = Math.max(0, Math.trunc(centre - reach + 0.5));
    const last = Math.min(from, Math.trunc(centre + reach + 0.5));
    const weights = new Float64Array(last - first).map((_, k) => weight((first + k - centre + 0.5) * (1 / stretch)));
    const sum = weights.reduce((total, each) => total + each, 0);
    const whole = (each) => Math.trunc(each * (1 << BITS) + (each < 0 ? -0.5 : 0.5));
    return { first, weights: Int32Array.from(weights, (each) => whole(sum === 0 ? each : each / sum)) };
  });
}

const rounded = (sum) => Math.min(255, Math.max(0, sum >> BITS));

function across(image, width, filter) {
  if (width === image.width) return image;
  const { height, channels, data } = image;
  const out = new Uint8Array(width * height * channels);
  const all = taps(image.width, width, filter);
  for (let y = 0, to = 0; y < height; y++) {
    for (const { first, weights } of all) {
      for (let c = 0; c < channels; c++) {
        let sum = 1 << (BITS - 1), at = (y * image.width + first) * channels + c;
        for (let k = 0; k < weights.length; k++, at += channels) sum += data[at] * weights[k];
        out[to++] = rounded(sum);
      }
    }
  }
  return { width, height, channels, data: out };
}

function down(image, height, filter) {
  if (height === image.height) return image;
  const row = image.width * image.channels, out = new Uint8Array(height * row);
  taps(image.height, height, filter).forEach(({ first, weights }, y) => {
    for (let x = 0; x < row; x++) {
      let sum = 1 << (BITS - 1), at = first * row + x;
      for (let k = 0; k < weights.length; k++, at += row) sum += image.data[at] * weights[k];
      out[y * row + x] = rounded(sum);
    }
  });
  return { ...image, height, data: out };
}

// Steps are added up as Pillow does, not multiplied: they differ where a position falls on the edge of a pixel.
function places(from, to) {
  const step = from / to, found = new Int32Array(to);
  for (let i = 0, at = step * 0.5; i < to; i++, at += step) found[i] = Math.min(from - 1, Math.trunc(at));
  return found;
}

function nearest(image, width, height) {
  const { channels, data } = image, out = new Uint8Array(width * height * channels);
  const columns = places(image.width, width), rows = places(image.height, height);
  for (let y = 0; y < height; y++) {
    for (let x = 0; x < width; x++) {
      const from = (rows[y] * image.width + columns[x]) * channels;
      for (let c = 0; c < channels; c++) out[(y * width + x) * channels + c] = data[from + c];
    }
  }
  return { width, height, channels, data: out };
}

// filter: "nearest", "bilinear", "bicubic" or "lanczos".
export function resize(image, width, height, filter) {
  if (width === image.width && height === image.height) return image;
  if (filter === "nearest") return nearest(image, width, height);
  const lost = image.height - height, own = FILTERS[filter];
  // If far more rows than columns are removed, rows are resized first. (Pillow 12 and older always begin with columns.)
  if (lost > 0 && lost > 2 * (image.width - width)) return across(down(image, height, own), width, own);
  return down(across(image, width, own), height, own);
}
