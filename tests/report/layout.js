// What is wrong with the layout of a page in an <iframe>: a list of texts, each "kind: where (what)".
// The page itself is not changed, but for its <details>, which are opened.
function layoutErrors(frame) {
  const view = frame.contentWindow, page = frame.contentDocument, width = page.documentElement.clientWidth;
  const errors = new Set();
  const style = (element) => view.getComputedStyle(element);
  const shown = (text) => JSON.stringify(text.trim().replace(/\s+/g, " ").slice(0, 60));
  const name = (element) => {
    const where = element.closest("section[aria-labelledby], header, footer");
    const part = where ? where.getAttribute("aria-labelledby") || where.localName : "page";
    return `${part} > ${element.localName}${element.getAttribute("class") ? "." + element.getAttribute("class") : ""}`;
  };
  const say = (kind, element, what) => errors.add(`${kind}: ${name(element)} (${what})`);
  const ancestors = function* (element) {
    for (let each = element; each; each = each.parentElement) yield each;
  };
  // A property of an element that follows from that of its parent, each computed once.
  const inherited = (compute) => {
    const known = new Map([[null, undefined]]);
    const find = (element) => {
      if (!known.has(element)) known.set(element, compute(element, find(element.parentElement)));
      return known.get(element);
    };
    return find;
  };
  // Text for screen readers alone is cut to nothing, which is no error.
  const aside = inherited((element, above) => above || style(element).clipPath === "inset(50%)");
  const visible = (element) => element.checkVisibility({ visibilityProperty: true }) && !aside(element);

  for (const each of page.querySelectorAll("details")) each.open = true;

  // Nothing reaches beyond the sides of the page, and no part of it has to be scrolled sideways.
  if (page.documentElement.scrollWidth > width) {
    errors.add(`sideways: page (${page.documentElement.scrollWidth} of ${width} pixels)`);
  }
  // What a figure cuts at the edges of its axes has a box beyond them.
  const cut = (element) => element.closest("svg [clip-path]") !== null;
  const elements = [...page.body.querySelectorAll("*")].filter((each) => visible(each) && !cut(each));
  for (const element of elements) {
    const box = element.getBoundingClientRect();
    if (box.width && (box.left < -0.5 || box.right > width + 0.5)) {
      say("outside", element, `${box.left.toFixed(1)} to ${box.right.toFixed(1)} of ${width} pixels`);
    }
    if (/auto|scroll/.test(style(element).overflowX) && element.scrollWidth > element.clientWidth + 1) {
      say("sideways", element, `${element.scrollWidth} of ${element.clientWidth} pixels`);
    }
  }

  // Every line of every text, with the element that it belongs to.
  const lines = [];
  const walker = page.createTreeWalker(page.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const node = walker.currentNode, element = node.parentElement;
    if (!node.data.trim() || /^(style|script)$/.test(element.localName) || !visible(element)) continue;
    const range = page.createRange();
    range.selectNodeContents(node);
    for (const box of range.getClientRects()) if (box.width > 1) lines.push({ node, element, box });
  }

  for (const { node, element, box } of lines) {
    for (const each of ancestors(element)) {
      const frameBox = each.getBoundingClientRect(), own = !each.closest("svg") && style(each).display !== "inline";
      if ((own || (style(each).overflowX !== "visible" && each.localName !== "svg")) && (box.right > frameBox.right + 1 || box.left < frameBox.left - 1)) {
        say("clipped", element, `${shown(node.data)} sticks out of ${name(each)}`);
      }
      if (own) break;
    }
  }

  lines.sort((a, b) => a.box.top - b.box.top);
  lines.forEach((a, i) => {
    for (let j = i + 1; j < lines.length && lines[j].box.top < a.box.bottom; j++) {
      const b = lines[j];
      if (a.node === b.node) continue;
      const across = Math.min(a.box.right, b.box.right) - Math.max(a.box.left, b.box.left);
      const down = Math.min(a.box.bottom, b.box.bottom) - b.box.top;
      // Boxes of letters are higher than the letters.
      if (across > 2 && down > 0.3 * Math.min(a.box.height, b.box.height)) {
        say("overlap", a.element, `${shown(a.node.data)} and ${shown(b.node.data)}`);
      }
    }
  });

  // WCAG 2.1, success criterion 1.4.3: contrast of at least 4.5, of large letters 3.
  const parse = (colour) => colour.match(/[\d.]+/g).map(Number);
  const over = (front, back) => {
    const alpha = front.length > 3 ? front[3] : 1;
    return [0, 1, 2].map((i) => alpha * front[i] + (1 - alpha) * back[i]);
  };
  const luminance = (rgb) => {
    const [r, g, b] = rgb.map((v) => v / 255).map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const paper = inherited((element, above) => over(parse(style(element).backgroundColor), above || [255, 255, 255]));
  for (const { node, element } of lines) {
    const own = style(element), inFigure = element.closest("svg"), back = paper(element);
    const front = over(parse(inFigure ? own.fill : own.color), back);
    const [light, dark] = [luminance(front), luminance(back)].sort((a, b) => b - a);
    const scale = inFigure ? inFigure.getBoundingClientRect().width / inFigure.viewBox.baseVal.width : 1;
    const size = parseFloat(own.fontSize) * scale, ratio = (light + 0.05) / (dark + 0.05);
    const large = size >= 24 || (size >= 18.66 && own.fontWeight >= 700);
    if (ratio < (large ? 3 : 4.5)) say("contrast", element, `${ratio.toFixed(2)} of ${shown(node.data)}`);
    if (size < 9) say("small", element, `${size.toFixed(1)} pixels: ${shown(node.data)}`);
  }

  for (const image of page.querySelectorAll("img")) if (!image.alt.trim()) say("alt", image, "no words");
  for (const figure of page.querySelectorAll("svg")) if (!figure.ariaLabel) say("alt", figure, "no words");
  for (const each of page.querySelectorAll("[aria-labelledby]")) {
    if (!page.getElementById(each.getAttribute("aria-labelledby"))) say("alt", each, "named by nothing");
  }
  for (const each of view.performance.getEntriesByType("resource")) {
    if (!each.name.startsWith("data:")) errors.add(`request: page (${each.name})`);
  }
  return [...errors];
}
