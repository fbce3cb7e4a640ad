// Where a page finds the files of this folder, and the runtime.

const FOLDER = new URL("../", import.meta.url);
const MOST_THREADS = 4;

export async function bytes(path) {
  const answer = await fetch(new URL(path, FOLDER));
  if (!answer.ok) throw new Error(`${path} cannot be read (${answer.status}).`);
  return answer.arrayBuffer();
}

async function gpu() {
  const adapter = await navigator.gpu?.requestAdapter({ powerPreference: "high-performance" });
  if (!adapter) throw new Error("this browser offers no GPU.");
  return adapter;
}

// A GPU that is drawn by the CPU, as in virtual machines, is slower than WebAssembly.
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
    throw new Error(`runtime/ is not there or not whole: npm run build makes it. ${error.message}`);
  }
}

// Only the build that is expected is loaded. Threads need memory that is shared, which browsers give to pages that are
// cross-origin isolated only.
export async function runtime(backend) {
  if (backend === "webgpu") await gpu();
  const place = new URL("runtime/", FOLDER);
  const ort = await load(new URL(backend === "webgpu" ? "ort.webgpu.min.mjs" : "ort.wasm.min.mjs", place));
  const threads = globalThis.crossOriginIsolated ? Math.min(MOST_THREADS, navigator.hardwareConcurrency || 1) : 1;
  Object.assign(ort.env.wasm, { wasmPaths: place.href, numThreads: backend === "webgpu" ? 1 : threads });
  ort.env.logLevel = "error";
  return { ort, threads };
}
