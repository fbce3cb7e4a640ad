// Loading of this folder's files and of the runtime in a browser.

const FOLDER = new URL("../", import.meta.url);
const MOST_THREADS = 4;

export async function bytes(path) {
  const answer = await fetch(new URL(path, FOLDER));
  if (!answer.ok) throw new Error(`${path} cannot be read (${answer.status}).`);
  return answer.arrayBuffer();
}

async function gpu() {
  const adapter = await navigator.gpu?.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new Error("no GPU is available in this browser.");
  return adapter;
}

// A software GPU, as in virtual machines, is slower than WebAssembly.
export async function hasGpu() {
  try {
    const adapter = await gpu();
    return !(adapter.info?.isFallbackAdapter ?? adapter.isFallbackAdapter);
  } catch {
    return false;
  }
}

async function load(module) {
  try {
    return await import(module);
  } catch (error) {
    throw new Error(`runtime/ is missing or incomplete; run npm run build. ${error.message}`);
  }
}

// Loads only the needed build. Threads need shared memory, which browsers provide only to cross-origin isolated pages.
export async function runtime(backend) {
  if (backend === "webgpu") await gpu();
  const place = new URL("runtime/", FOLDER);
  const ort = await load(new URL(backend === "webgpu" ? "ort.webgpu.min.mjs" : "ort.wasm.min.mjs", place));
  const threads = globalThis.crossOriginIsolated ? Math.min(MOST_THREADS, navigator.hardwareConcurrency || 1) : 1;
  Object.assign(ort.env.wasm, { wasmPaths: place.href, numThreads: backend === "webgpu" ? 1 : threads });
  ort.env.logLevel = "error";
  return { ort, threads };
}
