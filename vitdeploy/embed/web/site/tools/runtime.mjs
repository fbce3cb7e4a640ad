// npm run build: copies the needed files of onnxruntime-web to runtime/. Then the folder is complete: any static server can
// serve it, and the page contacts no other host.
import { copyFile, mkdir, rm } from "node:fs/promises";

const FILES = [
  ...["ort.wasm.min.mjs", "ort-wasm-simd-threaded.mjs", "ort-wasm-simd-threaded.wasm"], // WebAssembly
  ...["ort.webgpu.min.mjs", "ort-wasm-simd-threaded.asyncify.mjs", "ort-wasm-simd-threaded.asyncify.wasm"], // WebGPU
];
const from = new URL("../node_modules/onnxruntime-web/", import.meta.url), to = new URL("../runtime/", import.meta.url);

await rm(to, { recursive: true, force: true });
await mkdir(to);
try {
  await Promise.all(FILES.map((name) => copyFile(new URL(`dist/${name}`, from), new URL(name, to))));
} catch (error) {
  console.error(`${error.message}\nRun npm ci first.`);
  process.exit(1);
}
console.log(`runtime/: ${FILES.length} files of onnxruntime-web`);
