// Many images, one after the other, each with its answer: a page of your own on the modules that
// `vitdeploy embed --as web` wrote. The model runs in a worker, so the page stays alive.

import { Engine } from "./app/client.js";
import { readImage } from "./app/images.js";
import { show } from "./app/overlay.js";

const $ = (id) => document.getElementById(id);
const engine = new Engine();
const ready = engine.call("open", "auto");
const rows = [["file", "label", "score"]];

function element(tag, text, name = "") {
  return Object.assign(document.createElement(tag), { textContent: text, className: name });
}

// What spreadsheets take for text, and never for a formula.
const quoted = (cell) => `"${String(cell).replace(/^[=+\-@\t\r]/, "'$&").replaceAll('"', '""')}"`;

async function answer(file) {
  const card = element("li", "");
  $("answers").append(card);
  try {
    await ready;
    const image = await readImage(file);
    const { answer: { top: [best] }, window } = await engine.call("predict", image);
    const canvas = element("canvas", "");
    show(canvas, image, { window }, 320);
    card.append(canvas, element("strong", `${best.label} ${(100 * best.score).toFixed(1)} %`), element("span", file.name, "note"));
    rows.push([file.name, best.label, best.score]);
  } catch (error) {
    card.append(element("strong", error.message, "wrong"), element("span", file.name, "note"));
  }
}

async function answerAll(files) {
  for (const file of files) await answer(file);
  const text = rows.map((row) => `${row.map(quoted).join(",")}\r\n`).join("");
  URL.revokeObjectURL($("save").href);
  $("save").href = URL.createObjectURL(new Blob([text], { type: "text/csv" }));
  $("save").hidden = rows.length === 1;
}

let last = Promise.resolve();
$("files").addEventListener("change", () => {
  const files = [...$("files").files];
  $("files").value = "";
  last = last.then(() => answerAll(files));
});

ready.then(({ where }) => { $("state").textContent = where; }, (error) => { $("state").textContent = error.message; });
