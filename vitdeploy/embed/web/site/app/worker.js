// Runs the model in its own thread, so that the page stays responsive. One message is one call:
// {id, call, args} -> {id, result} or {id, error}; calls are answered one after the other.

import * as source from "./browser.js";
import { Model, messageOf } from "./model.js";

let model = null;

const CALLS = {
  async open(backend) {
    const expected = backend === "auto" && !(await source.hasGpu()) ? "wasm" : backend;
    model = await Model.open(source, expected);
    return { backend: model.backend, note: model.note, where: model.where };
  },
  predict: async (image) => ({ ...(await model.predict(image)), latency: model.latency }),
  predictPrepared: async (pixels) => ({ ...(await model.predictPrepared(pixels)), latency: model.latency }),
  look: (pixels) => model.look(pixels),
  check: () => model.check(),
};

let last = Promise.resolve();
onmessage = ({ data: { id, call, args } }) => {
  last = last.then(async () => {
    try {
      postMessage({ id, result: await CALLS[call](...args) });
    } catch (error) {
      postMessage({ id, error: messageOf(error) });
    }
  });
};
