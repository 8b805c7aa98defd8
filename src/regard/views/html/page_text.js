// The text: its tokens in lines, with elements only for the visible ones, and a small map of all lines.

import { element, labelOf, sized, styleOf } from "./page_dom.js";
import { clamp } from "./page_numbers.js";
import { inkOn } from "./page_scale.js";

const LINE = 27;
const TEXT_FONT = "14px system-ui, 'Noto Sans', sans-serif";
const PADDING = 12;
const MINIMAP = 14;
const MARK = 2;
let panesOfText = 0;

/** The lines of tokens: the start of each, and the line of each token. A newline token ends one. */
export function linesOf(labels, widths, width) {
  const starts = [0], line = new Uint32Array(labels.count);
  let used = 0;
  for (let place = 0; place < labels.count; place++) {
    const ended = place > 0 && labels.texts?.[place - 1]?.endsWith("↵");
    if (place > starts.at(-1) && (used + widths[place] > width || ended)) {
      starts.push(place);
      used = 0;
    }
    used += widths[place];
    line[place] = starts.length - 1;
  }
  return { starts, line };
}

/** A list of tokens for queries, for keys, or for both. `act` receives events: point, choose, leave. */
export function textOf(name, act) {
  const id = `regard-text-${(panesOfText += 1)}`;
  const inner = element("div", { class: "lines", role: "presentation" });
  const scroller = element("div", { class: "scroller", tabindex: 0, role: "listbox", "aria-label": name, id }, inner);
  const minimap = element("canvas", { class: "minimap", "aria-hidden": "true" });
  const title = element("h2", {}, name);
  const frame = element("section", { class: "text" }, title, element("div", { class: "both" }, scroller, minimap));
  const measure = document.createElement("canvas").getContext("2d");
  const text = { frame, scroller, title, layout: null, labels: null, now: null, paintOf: null, focus: null };
  const widths = new Map();

  function widthsOf(labels) {
    measure.font = TEXT_FONT;
    return Float32Array.from({ length: labels.count }, (_, place) => {
      const label = labelOf(labels, place);
      if (!widths.has(label)) widths.set(label, Math.min(230, Math.max(14, measure.measureText(label).width)) + PADDING);
      return widths.get(label);
    });
  }

  /** Show labels; tokens stay while neither labels nor width change. */
  text.fill = (labels, order) => {
    const width = scroller.clientWidth - 8;
    if (text.labels === labels && text.width === width) return false;
    Object.assign(text, { labels, order, width, sizes: widthsOf(labels) });
    text.rank = null;
    if (order) {
      text.rank = new Uint32Array(labels.count);
      order.forEach((place, rank) => { text.rank[place] = rank; });
    }
    text.layout = linesOf(labels, text.sizes, width);
    inner.style.height = `${text.layout.starts.length * LINE + 4}px`;
    scroller.dataset.direction = labels.direction;
    return true;
  };

  /**
   * Draw the visible tokens. `what` has paintOf(place), the colours of a token or null; marks for the small map; the
   * focus; the found tokens; and the last token written so far.
   */
  text.draw = (now, what) => {
    const { focus } = Object.assign(text, { now, what }, what);
    const top = Math.floor(scroller.scrollTop / LINE);
    const bottom = Math.min(text.layout.starts.length, Math.ceil((scroller.scrollTop + scroller.clientHeight) / LINE) + 1);
    const wanted = new Set();
    for (let line = Math.max(0, top - 1); line < bottom; line++) wanted.add(line);
    const held = new Map();
    for (const child of [...inner.children]) {
      const line = Number(child.dataset.line);
      if (wanted.has(line) && child.labels === text.labels && child.width === text.width) held.set(line, child);
      else child.remove();
    }
    for (const line of wanted) {
      if (!held.has(line)) {
        const child = lineElement(line);
        inner.append(child);
        held.set(line, child);
      }
    }
    for (const child of held.values()) for (const token of child.children) paint(token);
    // A focus that is scrolled away has no element.
    if (inner.querySelector(".token.focus")) scroller.setAttribute("aria-activedescendant", `${id}-${focus}`);
    else scroller.removeAttribute("aria-activedescendant");
    drawMinimap();
  };

  function lineElement(line) {
    const { starts } = text.layout;
    const places = [];
    for (let place = starts[line]; place < (starts[line + 1] ?? text.labels.count); place++) places.push(place);
    if (text.rank) places.sort((a, b) => text.rank[a] - text.rank[b]);
    const child = element("div", { class: "line", role: "presentation", "data-line": line }, ...places.map((place) =>
      element("span", { class: "token", role: "option", id: `${id}-${place}`, "data-place": place, "aria-selected": "false" },
        labelOf(text.labels, place))));
    child.style.top = `${line * LINE + 2}px`;
    return Object.assign(child, { labels: text.labels, width: text.width });
  }

  function paint(token) {
    const place = Number(token.dataset.place), colours = text.paintOf?.(place) ?? null;
    if (token.painted !== (token.painted = JSON.stringify(colours))) {
      if (!colours) Object.assign(token.style, { background: "", color: "" });
      else if (typeof colours === "string") Object.assign(token.style, { background: colours, color: inkOn(colours) });
      else {
        const share = 100 / colours.length;
        const stops = colours.map((colour, i) => `${colour} ${i * share}% ${(i + 1) * share}%`).join(", ");
        Object.assign(token.style, { background: `linear-gradient(90deg, ${stops}) bottom / 100% 6px no-repeat var(--token)`, color: "" });
      }
    }
    token.classList.toggle("focus", place === text.focus);
    token.classList.toggle("pinned", place === text.focus && text.now.state.pinned);
    token.classList.toggle("found", text.found?.has(place) ?? false);
    token.classList.toggle("later", place > text.last);
    token.setAttribute("aria-selected", String(place === text.focus));
  }

  function drawMinimap() {
    const height = scroller.clientHeight, context = sized(minimap, MINIMAP, height), lines = text.layout.starts.length;
    const style = styleOf(text.now.root, "--line");
    context.fillStyle = style;
    const shown = Math.min(1, height / (lines * LINE));
    context.globalAlpha = 0.55;
    context.fillRect(0, (scroller.scrollTop / (lines * LINE)) * height, MINIMAP, Math.max(6, shown * height));
    context.globalAlpha = 1;
    const y = (place) => ((text.layout.line[place] + 0.5) / lines) * height - MARK / 2;
    for (const [place, colour] of text.marks ?? []) {
      context.fillStyle = colour;
      context.fillRect(3, y(place), MINIMAP - 3, MARK);
    }
    context.fillStyle = styleOf(text.now.root, "--ink");
    for (const place of text.found ?? []) context.fillRect(0, y(place), 2, MARK);
    if (text.focus !== null && text.focus !== undefined) context.fillRect(0, y(text.focus) - 0.5, MINIMAP, 3);
  }

  /** Scroll a token into view. */
  text.reveal = (place) => {
    const top = text.layout.line[place] * LINE;
    if (top < scroller.scrollTop || top + LINE > scroller.scrollTop + scroller.clientHeight) {
      scroller.scrollTop = Math.max(0, top - scroller.clientHeight / 2);
    }
  };

  const placeOf = (event) => {
    const token = event.target.closest?.(".token");
    return token && inner.contains(token) ? Number(token.dataset.place) : null;
  };
  scroller.addEventListener("scroll", () => text.now && text.draw(text.now, text.what));
  inner.addEventListener("pointermove", (event) => event.pointerType !== "touch" && placeOf(event) !== null && act("point", placeOf(event)));
  inner.addEventListener("pointerleave", () => act("leave"));
  inner.addEventListener("click", (event) => placeOf(event) !== null && act("choose", placeOf(event)));
  minimap.addEventListener("click", (event) => {
    scroller.scrollTop = (event.offsetY / scroller.clientHeight) * text.layout.starts.length * LINE - scroller.clientHeight / 2;
  });
  scroller.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey) return;
    const next = step(event.key, text);
    if (event.key === "Enter" || event.key === " ") {
      event.preventDefault();
      if (text.focus !== null && text.focus !== undefined) act("choose", text.focus);
    } else if (next !== null) {
      event.preventDefault();
      act("walk", next);
    }
  });
  return text;
}

/** The token for a key of the keyboard, in the order on the screen, or null. */
function step(key, { labels, layout, focus, rank, order }) {
  const from = focus ?? null;
  if (key === "Home") return 0;
  if (key === "End") return labels.count - 1;
  if (!["ArrowLeft", "ArrowRight", "ArrowUp", "ArrowDown"].includes(key)) return null;
  if (from === null) return 0;
  const line = layout.line[from];
  if (key === "ArrowUp" || key === "ArrowDown") {
    const to = line + (key === "ArrowUp" ? -1 : 1);
    if (to < 0 || to >= layout.starts.length) return from;
    const offset = from - layout.starts[line];
    return Math.min(layout.starts[to] + offset, (layout.starts[to + 1] ?? labels.count) - 1);
  }
  const forward = key === "ArrowRight" ? 1 : -1;
  if (!rank) return clamp(from + forward, 0, labels.count - 1);
  const next = order[rank[from] + forward];
  return next === undefined ? from : next;
}
