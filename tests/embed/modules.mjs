// Runs modules of a written page in Node on cases from standard input: {resize: [...], detect: [...], classify: [...],
// golden: [...]}.
// Gives what they answer, as JSON. The page's folder is the first argument.
import { readFileSync } from "node:fs";
import { pathToFileURL } from "node:url";

const app = (name) => import(pathToFileURL(`${process.argv[2]}/app/${name}`));
const { prepare, toInput, inputWindow } = await app("preprocess.js");
const { classify, cosine, detect, toAnswer } = await app("answers.js");
const { classMap, classAreas, depthMap, depthRange, matteMap, shareAbove } = await app("maps.js");
const { measure, pictureMade } = await app("answers.js");
const { pointsOf } = await app("points.js");
const { checkGolden } = await app("golden.js");
const floats = (rows) => Object.fromEntries(Object.entries(rows).map(([name, values]) => [name, Float32Array.from(values)]));

const cases = JSON.parse(readFileSync(0, "utf8"));
console.log(JSON.stringify({
  prepare: cases.prepare.map(({ width, height, data, spec }) => {
    const pixels = prepare({ width, height, data: Uint8Array.from(Buffer.from(data, "base64")) }, spec);
    const { values } = toInput(pixels, spec, { dtype: "float32", batch: 2 });
    return {
      pixels: Buffer.from(pixels.data).toString("base64"),
      floats: Buffer.from(values.buffer).toString("base64"),
      window: inputWindow(width, height, spec),
    };
  }),
  detect: cases.detect.map(({ outputs, width, height, spec, post, labels }) =>
    detect(floats(outputs), width, height, spec, post, labels)),
  maps: (cases.maps ?? []).map(({ outputs, shapes, width, height, spec, post, labels }) => {
    if (shapes.depth) {
      const map = depthMap(floats(outputs), shapes, width, height, spec, post);
      return { map: [...map].map((each) => (Number.isFinite(each) ? each : null)), range: depthRange(map) };
    }
    if (shapes.foreground) {
      const map = matteMap(floats(outputs), shapes, width, height, spec, post);
      return { map: [...map].map((each) => (Number.isFinite(each) ? each : null)), share: shareAbove(map, post.threshold) };
    }
    const map = classMap(floats(outputs), shapes, width, height, spec, post);
    return { map: [...map], classes: classAreas(map, labels) };
  }),
  points: (cases.points ?? []).map(({ maps, shape, width, height, spec, post, labels }) =>
    pointsOf(Float32Array.from(maps), shape, spec, post, labels, inputWindow(width, height, spec))),
  made: (cases.made ?? []).map(({ values, shape, post }) => [...pictureMade(Float32Array.from(values), shape, post).data]),
  measured: (cases.measured ?? []).map(({ numbers, post, labels }) => measure(Float32Array.from(numbers), post, labels)),
  labels: (cases.labels ?? []).map(({ form, outputs, labels }) => toAnswer(floats(outputs), 1, 1, { form }, labels)),
  classify: cases.classify.map(({ logits, labels }) => classify(Float32Array.from(logits), labels)),
  golden: await Promise.all(cases.golden.map(({ expected, rows }) => {
    const facts = {
      form: { kind: "ranking", output: "logits" }, preprocess: { crop: [1, 1], mean: [0] },
      golden: { images: rows.length, outputs: ["logits"], engine: { folder: "golden", tolerance: 0.05, least_same: rows.length } },
    };
    const bytes = async (path) => (path.endsWith("u8") ? new ArrayBuffer(rows.length) : Float32Array.from(expected).buffer);
    const left = [...rows];
    return checkGolden(facts, bytes, async () => ({ logits: Float32Array.from(left.shift()) }), "engine");
  })),
  cosine: cosine(Float32Array.of(1, 2, 3), Float32Array.of(-2, 1, 0.5)),
}));
