// The page's side of worker.js: `await engine.call("predict", image)`.

export class Engine {
  #worker;
  #waiting = new Map();
  #count = 0;

  constructor() {
    this.#worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.#worker.onmessage = ({ data: { id, result, error } }) => {
      const { resolve, reject } = this.#waiting.get(id);
      this.#waiting.delete(id);
      if (error === undefined) resolve(result);
      else reject(new Error(error));
    };
    this.#worker.onerror = (event) => this.#fail(event.message || "a module of the page cannot be loaded.");
  }

  call(call, ...args) {
    const id = this.#count++;
    return new Promise((resolve, reject) => {
      this.#waiting.set(id, { resolve, reject });
      this.#worker.postMessage({ id, call, args });
    });
  }

  close() {
    this.#worker.terminate();
    this.#fail("The engine was closed.");
  }

  #fail(text) {
    for (const { reject } of this.#waiting.values()) reject(new Error(text));
    this.#waiting.clear();
  }
}
