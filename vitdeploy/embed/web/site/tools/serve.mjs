// npm start: serves this folder on this machine only, with the two headers that enable threads.
// npm start -- 8080 uses another port.
import { createReadStream } from "node:fs";
import { realpath, stat } from "node:fs/promises";
import { createServer } from "node:http";
import { extname, join, sep } from "node:path";
import { fileURLToPath } from "node:url";

const FOLDER = await realpath(fileURLToPath(new URL("..", import.meta.url)));
const TYPES = {
  ".html": "text/html; charset=utf-8", ".css": "text/css; charset=utf-8", ".svg": "image/svg+xml",
  ".js": "text/javascript", ".mjs": "text/javascript", ".wasm": "application/wasm", ".json": "application/json",
  ".txt": "text/plain; charset=utf-8",
};
const HEADERS = {
  "Cross-Origin-Opener-Policy": "same-origin",
  "Cross-Origin-Embedder-Policy": "require-corp",
  "X-Content-Type-Options": "nosniff",
  "Cache-Control": "no-cache",
};

// The requested file; null if it does not exist or is outside the folder.
async function find(url) {
  try {
    const { pathname } = new URL(url, "http://localhost");
    const file = await realpath(join(FOLDER, decodeURIComponent(pathname === "/" ? "/index.html" : pathname)));
    return file.startsWith(FOLDER + sep) && (await stat(file)).isFile() ? file : null;
  } catch {
    return null;
  }
}

const server = createServer(async ({ url, method }, response) => {
  const file = ["GET", "HEAD"].includes(method) ? await find(url) : null;
  if (!file) return response.writeHead(404, HEADERS).end("not found\n");
  response.writeHead(200, { ...HEADERS, "Content-Type": TYPES[extname(file)] ?? "application/octet-stream" });
  return method === "HEAD" ? response.end() : createReadStream(file).on("error", () => response.destroy()).pipe(response);
});

const port = Number(process.argv[2] ?? 8000);
server.on("error", (error) => {
  console.error(error.code === "EADDRINUSE" ? `Port ${port} is in use. To use another port: npm start -- ${port + 1}` : error.message);
  process.exit(1);
});
server.listen(port, "127.0.0.1", () => console.log(`http://localhost:${server.address().port}/ (Ctrl+C stops)`));
