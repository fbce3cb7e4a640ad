// The check of the bundle's golden answers: prepared images, with the recorded outputs of the engine and of the original model.

// The float32 values of a little-endian file.
function floats(bytes) {
  const view = new DataView(bytes);
  return Float32Array.from({ length: bytes.byteLength / 4 }, (_, i) => view.getFloat32(4 * i, true));
}

function best(row) {
  return row.reduce((at, each, i) => (each > row[at] ? i : at), 0);
}

// The number of images with the original's first class. Two classes whose scores are equal within the tolerance may be swapped.
function sameFirst(found, expected, allowed, classes) {
  let equal = 0, tied = 0;
  for (let at = 0; at < expected.length; at += classes) {
    const ours = best(found.slice(at, at + classes)), theirs = best(expected.slice(at, at + classes));
    if (ours === theirs) equal += 1;
    else if (expected[at + theirs] - expected[at + ours] <= allowed) tied += 1;
  }
  return { equal, tied };
}

// The prepared images, as `prepare` gives them.
export async function goldenImages(facts, bytes) {
  const [height, width] = facts.preprocess.crop, channels = facts.preprocess.mean.length;
  const all = new Uint8Array(await bytes("golden/inputs.u8")), size = width * height * channels;
  return Array.from({ length: facts.golden.images }, (_, i) =>
    ({ width, height, channels, data: all.slice(i * size, (i + 1) * size) }));
}

// run: prepared pixels -> outputs by name; graph: "engine" or "float", which is compared with the original.
// Gives {ok, images, outputs: [{name, difference, ok}], tolerance, first}: differences are the largest over the largest value
// of what is compared with, as the bundle's manifest has them.
export async function checkGolden(facts, bytes, run, graph) {
  const images = await goldenImages(facts, bytes), { folder, tolerance, least_same: least } = facts.golden[graph], found = {};
  for (const image of images) {
    const outputs = await run(image);
    for (const name of facts.golden.outputs) (found[name] ??= []).push(...Array.from(outputs[name], Number));
  }
  const outputs = [];
  let first = null;
  for (const name of facts.golden.outputs) {
    const expected = floats(await bytes(`${folder}/${name}.f32`));
    let difference = found[name].length === expected.length ? 0 : Infinity, largest = 1e-30;
    expected.forEach((each, i) => {
      const apart = Math.abs(found[name][i] - each);
      if (!(apart <= difference)) difference = Number.isNaN(apart) ? Infinity : apart;
      largest = Math.max(largest, Math.abs(each));
    });
    outputs.push({ name, difference: difference / largest, ok: difference / largest <= tolerance });
    if (facts.form.kind === "ranking" && name === facts.form.output) {
      const original = floats(await bytes(`golden/original/${name}.f32`));
      first = sameFirst(found[name], original, tolerance * largest, expected.length / images.length);
    }
  }
  const firstOk = first === null || first.equal + first.tied >= least;
  return { ok: firstOk && outputs.every((each) => each.ok), images: images.length, outputs, tolerance, first };
}

export function describeCheck({ ok, images, outputs, tolerance, first }) {
  const parts = outputs.map(({ name, difference }) => `${name} ${difference.toExponential(1)}`);
  const top = first === null ? "" : `, ${first.equal} of ${images} with the original's first class`
    + (first.tied ? ` (${first.tied} within the tolerance)` : "");
  return `${ok ? "Correct" : "WRONG"}: ${images} images${top}. Largest difference: ${parts.join(", ")} of the largest value; `
    + `limit ${tolerance.toExponential(1)}.`;
}
