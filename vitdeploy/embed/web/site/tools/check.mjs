// npm test: checks the golden answers in Node with the modules of the page. Exit code 1 if they are wrong.
import { readFile } from "node:fs/promises";
import * as ort from "onnxruntime-web";
import { describeCheck } from "../app/golden.js";
import { Model } from "../app/model.js";

const FOLDER = new URL("../", import.meta.url);

const source = {
  bytes: async (path) => new Uint8Array(await readFile(new URL(path, FOLDER))).buffer,
  runtime: async () => {
    ort.env.wasm.numThreads = 1;
    return { ort, threads: 1 };
  },
};

const model = await Model.open(source, "wasm");
const check = await model.check();
console.log(`${model.where}: ${describeCheck(check)}`);
console.log("npm start serves the page.");
process.exit(check.ok ? 0 : 1);
