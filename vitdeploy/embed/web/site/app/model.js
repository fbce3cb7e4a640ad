// The model with pre- and postprocessing: images in, answers out. It runs in a page, in a worker and in Node; `source` reads
// files and loads a build of onnxruntime-web (browser.js, tools/check.mjs):
//     bytes(path) -> Promise<ArrayBuffer> of a file of this folder
//     runtime(backend) -> Promise<{ort, threads}> for "wasm" or "webgpu"; throws if it is not available

import { toAnswer } from "./answers.js";
import { checkGolden, describeCheck } from "./golden.js";
import { inputWindow, prepare, toInput } from "./preprocess.js";

const KEPT_TIMES = 20;

// onnxruntime-web throws errors, strings and numbers.
export const messageOf = (error) => (error instanceof Error ? error.message : `onnxruntime-web failed: ${error}`);

export function median(values) {
  const sorted = [...values].sort((a, b) => a - b), half = sorted.length >> 1;
  return sorted.length % 2 ? sorted[half] : (sorted[half - 1] + sorted[half]) / 2;
}

export async function readFacts(source) {
  const text = async (path) => new TextDecoder().decode(await source.bytes(path));
  const facts = JSON.parse(await text("model/model.json"));
  const labels = (await text("model/labels.txt")).replace(/\n$/, "").split("\n");
  return { facts, labels: labels.length === 1 && labels[0] === "" ? [] : labels };
}

// One graph in one runtime.
class Graph {
  static async open(source, { ort, threads }, backend, facts, name) {
    const entry = facts.graphs[name];
    const session = await ort.InferenceSession.create(new Uint8Array(await source.bytes(`model/${entry.file}`)), {
      executionProviders: [backend],
    });
    return Object.assign(new Graph(), { ort, threads, session, entry, spec: facts.preprocess });
  }

  // Outputs of one prepared image by name, without the batch axis.
  async run(pixels) {
    const { values, shape } = toInput(pixels, this.spec, this.entry);
    const feeds = { [this.entry.input]: new this.ort.Tensor(this.entry.dtype, values, shape) };
    const outputs = await this.session.run(feeds), { batch } = this.entry;
    return Object.fromEntries(Object.entries(outputs).map(([name, { data }]) => [name, data.subarray(0, data.length / batch)]));
  }
}

export class Model {
  // backend: "wasm", "webgpu", or "auto": WebGPU if a GPU gives the golden answers, otherwise WebAssembly, with the reason in
  // `note`.
  static async open(source, backend = "auto") {
    const model = new Model();
    Object.assign(model, { source, ...(await readFacts(source)), times: [], note: "", backend });
    if (backend !== "wasm") {
      try {
        await model.#start("webgpu");
        const check = await model.check();
        if (check.ok) return model;
        model.note = `WebGPU is not used, because its answers are wrong. ${describeCheck(check)}`;
      } catch (error) {
        model.note = `WebGPU is not used: ${messageOf(error)}`;
      }
    }
    await model.#start("wasm");
    return model;
  }

  async #start(backend) {
    this.backend = backend;
    this.runtime = await this.source.runtime(backend);
    // INT8 runs on CPUs only; on a GPU the float graph runs, which also gives the attention map.
    this.graph = await Graph.open(this.source, this.runtime, backend, this.facts, backend === "webgpu" ? "float" : "engine");
    this.mapper = backend === "webgpu" ? this.graph : null;
    const [height, width] = this.facts.preprocess.crop, channels = this.facts.preprocess.mean.length;
    await this.graph.run({ width, height, channels, data: new Uint8Array(width * height * channels) }); // warm
  }

  // image: {width, height, data: RGBA}. Returns {answer, pixels: the model's input, window: its region in the image, prepare,
  // infer: milliseconds}; `infer` is from pixels in memory to outputs in memory.
  async predict(image) {
    const start = performance.now(), { width, height } = image;
    const pixels = prepare(image, this.facts.preprocess);
    const time = performance.now() - start;
    return { ...(await this.#answer(pixels, width, height, this.facts)), prepare: time };
  }

  // The same for prepared pixels, {width, height, channels, data}; the window is the whole image.
  async predictPrepared(pixels) {
    const { width, height } = pixels, { preprocess } = this.facts;
    const whole = { ...preprocess, resize: preprocess.crop, fit: "stretch", topdown: preprocess.fit === "topdown" };
    return { ...(await this.#answer(pixels, width, height, { ...this.facts, preprocess: whole })), prepare: 0 };
  }

  async #answer(pixels, width, height, facts) {
    const start = performance.now();
    const outputs = await this.graph.run(pixels);
    const infer = performance.now() - start;
    this.times = [...this.times, infer].slice(-KEPT_TIMES);
    const window = inputWindow(width, height, facts.preprocess);
    return { answer: toAnswer(outputs, width, height, facts, this.labels), pixels, window, infer };
  }

  // The attention map of prepared pixels from the float graph: {rows, columns, values}, shares of attention.
  async look(pixels) {
    this.mapper ??= await Graph.open(this.source, this.runtime, this.backend, this.facts, "float");
    const [rows, columns] = this.facts.attention.grid;
    return { rows, columns, values: (await this.mapper.run(pixels)).attention };
  }

  check() {
    const graph = this.backend === "webgpu" ? "float" : "engine";
    return checkGolden(this.facts, this.source.bytes, (pixels) => this.graph.run(pixels), graph);
  }

  get latency() {
    return { median: this.times.length ? median(this.times) : null, runs: this.times.length };
  }

  // A description of the runtime and the precision.
  get where() {
    const { precision } = this.graph.entry, { threads } = this.runtime;
    return this.backend === "webgpu" ? `WebGPU, ${precision}` : `WebAssembly, ${threads} thread${threads > 1 ? "s" : ""}, ${precision}`;
  }
}
