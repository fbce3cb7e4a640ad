// The page: what is chosen, dropped, pasted or drawn goes to the engine, and its answers are shown. Texts from outside,
// such as labels, are only ever set as text.

import { cosine } from "./answers.js";
import * as source from "./browser.js";
import { Engine } from "./client.js";
import { describeCheck, goldenImages } from "./golden.js";
import { readImage, toRgba } from "./images.js";
import { readFacts } from "./model.js";
import { show } from "./overlay.js";
import { Pad, toPixels } from "./pad.js";

const TASKS = { classification: "Image classification", features: "Image features", detection: "Object detection" };
const $ = (id) => document.getElementById(id);
const percent = (share) => `${(100 * share).toFixed(1)} %`;
const time = (ms) => `${ms < 10 ? ms.toFixed(1) : Math.round(ms)} ms`;

function make(tag, { text = "", name = "" } = {}, ...children) {
  const element = document.createElement(tag);
  if (text) element.textContent = text;
  if (name) element.className = name;
  element.append(...children);
  return element;
}

let facts, engine = null, ready = null, pad = null;
let shown = null; // {image, result, map} of the latest answer
let kept = null; // the vector that others are compared with
let turn = 0; // of the latest wish: what was asked for before it is no longer shown

function complain(error) {
  $("alert").textContent = error ? error.message : "";
  $("alert").hidden = !error;
}

// --- the engine -----------------------------------------------------------------------------------------------------

function start(backend) {
  engine?.close();
  engine = new Engine();
  const own = engine;
  $("where").textContent = "Loading.";
  $("state").textContent = "loading the engine";
  $("check").disabled = true;
  $("checked").textContent = $("note").textContent = "";
  ready = own.call("open", backend).then(({ where, note }) => {
    $("where").textContent = `${where}.`;
    const alone = where.includes("1 thread,") && !crossOriginIsolated;
    const why = alone ? "One thread, because this page is not cross-origin isolated: README.md says how it becomes so." : "";
    $("note").textContent = [note, why].filter(Boolean).join(" ");
    $("note").hidden = !$("note").textContent;
    $("state").textContent = "ready";
    $("check").disabled = false;
  });
  return ready.catch((error) => {
    if (own !== engine) return;
    $("state").textContent = "no engine";
    $("where").textContent = "It could not be loaded.";
    complain(new Error(`The engine could not be loaded. ${error.message}`));
  });
}

async function check() {
  $("check").disabled = true;
  $("checked").textContent = "Checking.";
  try {
    await ready;
    $("checked").textContent = describeCheck(await engine.call("check"));
  } catch (error) {
    $("checked").textContent = error.message;
  }
  $("check").disabled = false;
}

// --- answers --------------------------------------------------------------------------------------------------------

// ask: () -> {image, result}, or null where there is nothing to answer any more.
async function answer(ask) {
  const own = ++turn;
  try {
    await ready;
    const found = await ask();
    if (own !== turn) return;
    complain(null);
    shown = found;
    describe(found.result);
    await look(own);
  } catch (error) {
    if (own === turn) complain(error);
  }
}

const fromBlob = (blob) => answer(async () => {
  const start = performance.now(), image = await readImage(blob), reading = performance.now() - start;
  const result = await engine.call("predict", image);
  return { image, result: { ...result, prepare: result.prepare + reading } };
});

const fromPixels = (pixels) => answer(async () => ({ image: toRgba(pixels), result: await engine.call("predictPrepared", pixels) }));

function drawn(strokes) {
  if (strokes.length) {
    document.body.classList.add("drawn");
    fromPixels(toPixels(strokes, facts.pad, facts.preprocess));
  } else {
    turn += 1;
    forget();
  }
}

function forget() {
  shown = null;
  complain(null);
  $("answer").replaceChildren(make("p", { text: "None yet.", name: "quiet" }));
  $("seen").hidden = $("facts").hidden = $("compare").hidden = true;
  $("looked").textContent = "";
}

function describe({ answer: found, infer, prepare, latency }) {
  const parts = { classification: classes, features: vector, detection: objects }[found.task](found);
  $("answer").replaceChildren(...parts);
  $("compare").hidden = found.task !== "features";
  $("latency").textContent = time(latency.median ?? infer);
  $("latency-note").textContent = latency.runs > 1 ? `The model: median of the last ${latency.runs} runs` : "The model: its first run";
  $("prepare").textContent = time(prepare);
  $("facts").hidden = false;
}

function bar(score) {
  const filled = make("i");
  filled.style.width = percent(score);
  return make("div", { name: "bar" }, filled);
}

const best = (text, note) => make("p", { name: "best" }, make("strong", { text }), make("span", { text: note }));

function list(entries) {
  return make("ol", { name: "scores" }, ...entries.map(({ label, score }) =>
    make("li", {}, make("span", { text: label }), make("span", { text: percent(score) }), bar(score))));
}

const classes = ({ top }) => [best(top[0].label, percent(top[0].score)), list(top)];

function objects({ objects: found }) {
  if (!found.length) return [best("Nothing", `with a score above ${facts.postprocess.threshold}`)];
  return [best(`${found.length} object${found.length > 1 ? "s" : ""}`, ""), list(found)];
}

function vector({ vector: values }) {
  const length = Math.sqrt(values.reduce((sum, each) => sum + each * each, 0));
  const parts = [best(`${values.length} numbers`, `length ${length.toPrecision(4)}`)];
  if (kept) parts.push(make("p", { text: `Cosine to the kept image: ${cosine(values, kept).toFixed(4)}` }));
  return parts;
}

// --- where the model looks ------------------------------------------------------------------------------------------

async function look(own = turn) {
  if (!shown) return;
  const wanted = $("overlay").checked && facts.attention.grid !== undefined;
  if (wanted && !shown.map) {
    $("looked").textContent = "Looking.";
    paint();
    const map = await engine.call("look", shown.result.pixels);
    if (own !== turn) return;
    shown.map = map;
  }
  paint();
}

function paint() {
  const { image, result, map } = shown, on = $("overlay").checked && map;
  show($("view"), image, { window: result.window, map: on ? map : null, objects: result.answer.objects });
  const whole = image.width === result.pixels.width && image.height === result.pixels.height;
  $("caption").textContent = whole ? "What the model sees." : `${image.width} × ${image.height} pixels; the model sees what is not shaded.`;
  $("seen").hidden = false;
  if (!$("overlay").checked) $("looked").textContent = "";
  else if (on) {
    const sum = map.values.reduce((a, b) => a + b, 0), most = map.values.reduce((a, b) => Math.max(a, b), 0);
    $("looked").textContent = `${facts.attention.reader}; ${percent(sum)} on patches, at most ${percent(most)} on one of ${map.rows} × ${map.columns}`;
  }
}

// --- the page -------------------------------------------------------------------------------------------------------

function introduce() {
  document.title = facts.name;
  $("name").textContent = facts.name;
  $("task").textContent = TASKS[facts.task];
  $("version").textContent = facts.version;
  $("digest").textContent = `sha256:${facts.digest}`;
  $("looking").hidden = facts.attention.grid === undefined;
  $("no-map").hidden = facts.attention.grid !== undefined;
  $("no-map").textContent = facts.attention.reason ?? "";
  if (facts.pad) {
    $("padded").hidden = false;
    pad = new Pad($("pad"), facts.pad, drawn);
  }
}

// The golden images, to have something to try at once.
async function offerExamples() {
  const images = await goldenImages(facts, source.bytes);
  $("examples").append(make("p", { text: "Examples that come with the model:", name: "note" }));
  images.forEach((pixels, i) => {
    const canvas = make("canvas"), button = make("button", {}, canvas);
    button.type = "button";
    button.setAttribute("aria-label", `Example ${i + 1}`);
    show(canvas, toRgba(pixels), { window: { left: 0, top: 0, width: pixels.width, height: pixels.height } }, 104);
    button.addEventListener("click", () => { pad?.clear(); document.body.classList.remove("drawn"); fromPixels(pixels); });
    $("examples").append(button);
  });
  $("examples").hidden = false;
}

function takeImage(blob) {
  if (!blob) return;
  pad?.clear();
  document.body.classList.remove("drawn");
  fromBlob(blob);
}

const imageOf = (transfer) => [...(transfer?.files ?? [])][0];

function listen() {
  $("file").addEventListener("change", () => { takeImage($("file").files[0]); $("file").value = ""; });
  document.addEventListener("paste", (event) => takeImage(imageOf(event.clipboardData)));
  document.addEventListener("dragover", (event) => { event.preventDefault(); document.body.classList.add("dropping"); });
  document.addEventListener("dragleave", (event) => { if (!event.relatedTarget) document.body.classList.remove("dropping"); });
  document.addEventListener("drop", (event) => {
    event.preventDefault();
    document.body.classList.remove("dropping");
    if (imageOf(event.dataTransfer)) takeImage(imageOf(event.dataTransfer));
    else complain(new Error("What was dropped is no file."));
  });
  $("clear").addEventListener("click", () => pad.clear());
  $("overlay").addEventListener("change", () => look().catch(complain));
  $("check").addEventListener("click", check);
  $("backend").addEventListener("change", () => { complain(null); start($("backend").value); });
  $("copy").addEventListener("click", () => navigator.clipboard.writeText(JSON.stringify([...shown.result.answer.vector])).catch(complain));
  $("keep").addEventListener("click", () => { kept = shown.result.answer.vector; describe(shown.result); });
}

// ?backend=wasm or webgpu chooses where it runs, ?check runs the golden answers at once.
async function main() {
  ({ facts } = await readFacts(source));
  introduce();
  listen();
  const wishes = new URLSearchParams(location.search), backend = wishes.get("backend");
  if (["wasm", "webgpu"].includes(backend)) $("backend").value = backend;
  const started = start($("backend").value);
  await offerExamples();
  await started;
  if (wishes.has("check")) await check();
}

main().catch((error) => complain(new Error(`The page could not be loaded. ${error.message}`)));
