// The page: sends chosen, dropped, pasted or drawn images to the engine and shows its answers. External texts, such as labels,
// are only inserted as text.

import { cosine } from "./answers.js";
import * as source from "./browser.js";
import { Engine } from "./client.js";
import { describeCheck, goldenImages } from "./golden.js";
import { readImage, toRgba } from "./images.js";
import { readFacts } from "./model.js";
import { pictureOf } from "./maps.js";
import { show } from "./overlay.js";
import { Pad, toPixels } from "./pad.js";

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
let where = ""; // and how the engine runs
let shown = null; // {image, result, map} of the latest answer
let asked = null; // the function that computed it, to repeat it with another engine
let kept = null; // the vector to compare others with
let turn = 0; // the number of the latest request; answers to earlier ones are not shown

function complain(error) {
  $("alert-box").hidden = !error;
  $("alert").textContent = error ? error.message : "";
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
  ready = own.call("open", backend).then((opened) => {
    const { note } = opened;
    ({ where } = opened);
    $("where").textContent = `${where}.`;
    const alone = where.includes("1 thread,") && !crossOriginIsolated;
    const why = alone ? "One thread, because this page is not cross-origin isolated; see README.md." : "";
    $("note").textContent = [note, why].filter(Boolean).join(" ");
    $("note").hidden = !$("note").textContent;
    $("state").textContent = "ready";
    $("check").disabled = false;
  });
  return ready.catch((error) => {
    if (own !== engine) return;
    $("state").textContent = "no engine";
    $("where").textContent = "Loading failed.";
    complain(new Error(`Loading the engine failed. ${error.message}`));
  });
}

async function check() {
  const own = engine, say = (text) => { if (own === engine) $("checked").textContent = text; };
  $("check").disabled = true;
  say("Checking.");
  try {
    await ready;
    say(describeCheck(await own.call("check")));
  } catch (error) {
    say(error.message);
  }
  if (own === engine) $("check").disabled = false;
}

// --- answers --------------------------------------------------------------------------------------------------------

// ask: () -> Promise<{image, result}>.
async function answer(ask) {
  const own = ++turn;
  asked = ask;
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
    fromPixels(toPixels(strokes, facts.pad, facts.preprocess));
  } else {
    turn += 1;
    forget();
  }
}

function forget() {
  shown = asked = null;
  complain(null);
  $("answer").replaceChildren(make("p", { text: "None yet.", name: "quiet" }));
  $("seen").hidden = $("facts").hidden = $("compare").hidden = true;
  if (facts.attention.grid) $("looked").textContent = "";
}

function describe({ answer: found, infer, prepare, latency }) {
  const parts = described(found);
  $("answer").replaceChildren(...parts);
  $("compare").hidden = !found.vector;
  $("latency").textContent = time(latency.median ?? infer);
  const runs = latency.runs > 1 ? `median of the last ${latency.runs} runs` : "one run";
  $("latency-note").textContent = `The model, ${runs}; ${where}`;
  $("prepare").textContent = time(prepare);
  $("prepared").hidden = prepare === 0;
  $("facts").hidden = false;
}

function bar(score) {
  const filled = make("i");
  filled.style.width = `${100 * score}%`;
  return make("div", { name: "bar" }, filled);
}

const best = (text, note) => make("p", { name: "best" }, make("strong", { text }), make("span", { text: note }));

function list(entries) {
  return make("ol", { name: "scores" }, ...entries.map(({ label, score }) =>
    make("li", {}, make("span", { text: label }), make("span", { text: percent(score) }), bar(score))));
}

const classes = ({ top }) => [best(top[0].label, percent(top[0].score)), list(top)];

function ownLabels({ scores }) {
  const found = scores.filter(({ has }) => has).sort((a, b) => b.score - a.score);
  const names = found.map(({ label }) => label).join(", ");
  return [best(names || "No label", names ? "" : "above its threshold"), list([...scores].sort((a, b) => b.score - a.score))];
}

const decision = ({ yes, label, score }) => [best(yes ? "Yes" : "No", label), list([{ label, score }])];

function objects({ objects: found }) {
  if (!found.length) return [best("Nothing", `with a score above ${facts.form.threshold}`)];
  return [best(`${found.length} object${found.length > 1 ? "s" : ""}`, ""), list(found)];
}

function areas({ classes: found }) {
  return found.length ? [best(found[0].label, `${percent(found[0].score)} of the image`), list(found)] : [best("Nothing", "")];
}

function range({ range: [low, median, high], values }) {
  const [unit, what] = values === "metric" ? [" m", "depth"] : ["", "relative inverse depth, larger is closer"];
  return [best(`${low.toPrecision(3)} to ${high.toPrecision(3)}${unit}`, `median ${median.toPrecision(3)}${unit}; ${what}`)];
}

function vector({ vector: values }) {
  const length = Math.sqrt(values.reduce((sum, each) => sum + each * each, 0));
  const parts = [best(`${values.length} numbers`, `length ${length.toPrecision(4)}`)];
  if (kept) parts.push(make("p", { text: `Cosine to the kept image: ${cosine(values, kept).toFixed(4)}` }));
  return parts;
}

function measures({ numbers }) {
  const texts = numbers.map(({ value, unit }) => `${Number(value.toPrecision(5))}${unit && " "}${unit}`);
  const others = numbers.slice(1).map(({ label }, i) => make("li", {}, make("span", { text: label }), make("span", { text: texts[i + 1] })));
  return [best(texts[0], numbers[0].label), ...(others.length ? [make("ol", { name: "scores" }, ...others)] : [])];
}

function pose({ points, threshold }) {
  const seen = points.filter(({ score }) => score >= threshold);
  // Scores have no bound; a bar ends at 1.
  const one = facts.preprocess.fit === "topdown" ? "for one object; crop the image to it" : "";
  return [best(`${seen.length} of ${points.length} points`, one), list(seen.map(({ label, score }) => ({ label, score: Math.min(1, score) })))];
}

const figure = ({ share }) => [best(percent(share), "of the image is foreground")];

const made = ({ picture: { width, height } }) => [best(`${width} × ${height} pixels`, "generated from the image")];

const several = ({ parts }) => parts.flatMap((part) => [make("h3", { text: part.name }), ...described(part)]);

const DESCRIBED = {
  ranking: classes, labels: ownLabels, decision, vector, numbers: measures, boxes: objects, classes: areas, depth: range,
  matte: figure, points: pose, picture: made, parts: several,
};

function described(found) {
  return DESCRIBED[found.kind](found);
}

// --- attention map --------------------------------------------------------------------------------------------------

async function look(own = turn) {
  if (!shown) return;
  const expected = $("overlay").checked && facts.attention.grid !== undefined;
  if (expected && !shown.map) {
    $("looked").textContent = "Computing the attention map.";
    paint();
    const map = await engine.call("look", shown.result.pixels);
    if (own !== turn) return;
    shown.map = map;
  }
  paint();
}

function paint() {
  const { image, result, map } = shown, on = $("overlay").checked && map;
  if (result.answer.picture) {
    const { picture } = result.answer, { width, height } = picture;
    show($("view"), picture, { window: { left: 0, top: 0, width, height } });
    $("caption").textContent = "The model's output.";
    $("seen").hidden = false;
    return;
  }
  const picture = result.answer.map ? pictureOf(result.answer) : null, pose = result.answer.points ? result.answer : null;
  show($("view"), image, { window: result.window, map: on ? map : null, objects: result.answer.objects, picture, pose });
  const { left, top, width, height } = result.window, size = `${image.width} × ${image.height} pixels`;
  const prepared = image.width === result.pixels.width && image.height === result.pixels.height;
  const shaded = left > 0 || top > 0 || left + width < image.width || top + height < image.height;
  const seen = shaded ? "the model does not see the shaded parts" : "the model sees the whole image";
  $("caption").textContent = prepared && !shaded ? "The model's input." : `${size}; ${seen}.`;
  $("seen").hidden = false;
  if (!facts.attention.grid) return;
  if (!$("overlay").checked) $("looked").textContent = "";
  else if (on) {
    const sum = map.values.reduce((a, b) => a + b, 0), [least, most] = [Math.min(...map.values), Math.max(...map.values)];
    $("looked").textContent = `${facts.attention.reader}: ${percent(sum)} on ${map.rows} × ${map.columns} patches, `
      + `${percent(least)} on the weakest and ${percent(most)} on the strongest one.`;
  }
}

// --- the page -------------------------------------------------------------------------------------------------------

function introduce() {
  document.title = facts.name;
  $("name").textContent = facts.name;
  const task = facts.task.replaceAll("-", " ");
  $("task").textContent = task[0].toUpperCase() + task.slice(1);
  $("version").textContent = facts.version;
  $("digest").textContent = `sha256:${facts.digest}`;
  $("looking").hidden = facts.attention.grid === undefined;
  $("looked").textContent = facts.attention.reason ?? "";
  if (facts.pad) {
    $("padded").hidden = false;
    $("more").prepend($("view-block")); // keeps the answer next to the pad on a phone
    $("more").append($("drop"));
    pad = new Pad($("pad"), facts.pad, drawn);
  }
}

// The golden images, as examples.
async function offerExamples() {
  const images = await goldenImages(facts, source.bytes);
  images.forEach((pixels, i) => {
    const canvas = make("canvas"), button = make("button", {}, canvas);
    button.type = "button";
    button.setAttribute("aria-label", `Example ${i + 1}`);
    show(canvas, toRgba(pixels), { window: { left: 0, top: 0, width: pixels.width, height: pixels.height } }, 104);
    button.addEventListener("click", () => { pad?.clear(); fromPixels(pixels); });
    $("examples").append(button);
  });
}

function takeImage(blob) {
  if (!blob) return;
  pad?.clear();
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
    else complain(new Error("Drop an image file."));
  });
  $("dismiss").addEventListener("click", () => complain(null));
  $("clear").addEventListener("click", () => pad.clear());
  $("overlay").addEventListener("change", () => look().catch(complain));
  $("check").addEventListener("click", check);
  $("backend").addEventListener("change", () => {
    complain(null);
    start($("backend").value);
    if (asked) answer(asked);
  });
  $("copy").addEventListener("click", () => navigator.clipboard.writeText(JSON.stringify([...shown.result.answer.vector])).catch(complain));
  $("keep").addEventListener("click", () => { kept = shown.result.answer.vector; describe(shown.result); });
}

// ?backend=wasm or webgpu selects the runtime, ?check runs the golden answers at start.
async function main() {
  $("state").textContent = "loading";
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

main().catch((error) => {
  $("state").textContent = "not loaded";
  complain(new Error(`Loading the page failed. ${error.message}`));
});
