// From the state to pixels: tokens, links, the map and the reading.

import { element, rightToLeft } from "./page_dom.js";
import { columnOf, readable, rowOf, strongest } from "./page_weights.js";

// The number of partners listed beside the map, and the width of the map's widest label in pixels.
const SHOWN = 9;
const LABEL_WIDTH = 130;
const LABEL_FONT = "12px system-ui, 'Noto Sans', sans-serif";

const views = new WeakMap();

export function dark(root) {
  return root.dataset.theme === "dark";
}

/** The view that is on the screen now, for events. */
export function current(parts) {
  return views.get(parts);
}

export function drawAll(parts, now) {
  views.set(parts, now);
  const { state } = now;
  parts.examples.value = String(state.example);
  parts.kinds.value = state.kind;
  parts.layers.value = state.layer;
  parts.head.value = String(state.head);
  parts.top.textContent = readable(now.top).replace(/\.?0+$/, "");
  const [down, across] = now.map.block;
  const block = `${now.map.even ? "" : "up to "}${down} × ${across}`;
  const what = now.map.pooling === "max" ? "largest" : "mass";
  const pooled = down * across > 1 ? `; each cell the ${what} of ${block} weights` : "";
  parts.mapTitle.textContent = `Map: queries down, keys across${pooled}`;
  parts.ramp.style.background = `linear-gradient(90deg, ${now.ramp.join(", ")})`;
  for (const thumb of parts.heads.querySelectorAll(".thumb")) {
    const chosen = thumb.dataset.map === String(state.map) && thumb.dataset.head === String(state.head);
    thumb.setAttribute("aria-pressed", chosen);
  }
  drawTokens(parts, now);
  drawLinks(parts, now);
  // Pointing at a token does not change the map.
  const drawn = [state.example, state.map, state.head, state.stretch, state.theme, parts.sentence.clientWidth].join(" ");
  if (parts.map.drawn !== drawn) drawMap(parts, now);
  parts.map.drawn = drawn;
  drawCross(parts, now);
  drawReading(parts, now);
}

/** The weights of the tokens in one line, which depend on the focus; null if none are shown. */
function lineWeights(now, side) {
  const { row, column } = now.state.focus ?? {};
  if (side === "column") return row === undefined ? null : rowOf(now.weights, now.columns, row);
  return column === undefined || row !== undefined ? null : columnOf(now.weights, now.columns, column);
}

function drawTokens(parts, now) {
  for (const [side, holder] of [["row", parts.queries], ["column", parts.keys]]) {
    const weights = lineWeights(now, side);
    const focus = now.state.focus?.[side];
    [...holder.children].forEach((token, place) => {
      const share = weights ? weights[place] / now.top : 0;
      token.style.background = weights ? now.colour(weights[place]) : "";
      // At about half the weight, the colour passes its middle lightness. From there on, the text takes the paper's colour.
      token.style.color = weights && share > 0.5 ? (dark(parts.root) ? "#10121a" : "#ffffff") : "";
      token.classList.toggle("focus", place === focus);
      token.classList.toggle("pinned", place === focus && now.state.pinned);
    });
  }
}

/** A canvas of the element's size in device pixels, cleared, with its context scaled to CSS pixels. */
function canvasOf(canvas, width, height) {
  const ratio = globalThis.devicePixelRatio || 1;
  canvas.width = Math.round(width * ratio);
  canvas.height = Math.round(height * ratio);
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

/** The queries and keys to join: those of the focus; without a focus, each query and its strongest key. */
function links(now) {
  const { row, column } = now.state.focus ?? {};
  const all = [];
  if (row !== undefined && column !== undefined) all.push([row, column]);
  else if (row !== undefined) for (let key = 0; key < now.columns; key++) all.push([row, key]);
  else if (column !== undefined) for (let query = 0; query < now.rows; query++) all.push([query, column]);
  else {
    for (let query = 0; query < now.rows; query++) {
      all.push([query, strongest(rowOf(now.weights, now.columns, query), 1).top[0].index]);
    }
  }
  return all.map(([query, key]) => [query, key, now.weights[query * now.columns + key] / now.top]);
}

function drawLinks(parts, now) {
  const frame = parts.sentence.getBoundingClientRect();
  const context = canvasOf(parts.links, frame.width, frame.height);
  const place = (token, edge) => {
    const box = token.getBoundingClientRect();
    return [(box.left + box.right) / 2 - frame.left, box[edge] - frame.top];
  };
  context.strokeStyle = getComputedStyle(parts.root).getPropertyValue("--accent");
  context.lineCap = "round";
  for (const [query, key, share] of links(now)) {
    if (share < 0.01) continue;
    const [x1, y1] = place(parts.keys.children[key], "bottom");
    const [x2, y2] = place(parts.queries.children[query], "top");
    const middle = (y1 + y2) / 2;
    context.globalAlpha = Math.min(1, (now.state.focus ? 0.15 : 0.06) + (now.state.focus ? 0.85 : 0.5) * share);
    context.lineWidth = 0.8 + 4 * share;
    context.beginPath();
    context.moveTo(x1, y1);
    context.bezierCurveTo(x1, middle, x2, middle, x2, y2);
    context.stroke();
  }
}

/** Fill a canvas with one pixel for each weight. */
export function paint(canvas, { height, width, weights }, colour, mirrored) {
  canvas.width = width;
  canvas.height = height;
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(width, height);
  weights.forEach((weight, i) => {
    const column = i % width;
    const at = 4 * (i - column + (mirrored ? width - 1 - column : column));
    const hex = parseInt(colour(weight).slice(1), 16);
    pixels.data.set([hex >> 16, (hex >> 8) & 255, hex & 255, 255], at);
  });
  context.putImageData(pixels, 0, 0);
}

/** The place of the map in its canvas: cell size, margins for the labels, direction. */
function mapPlace(parts, now) {
  const context = parts.map.getContext("2d");
  context.font = LABEL_FONT;
  const longest = (labels) => Math.min(LABEL_WIDTH, labels.reduce((most, label) => Math.max(most, context.measureText(label).width), 0));
  const left = longest(now.rowLabels) + 8;
  // The reading stands beside the map if there is room for both.
  const beside = parts.sentence.clientWidth > 700 ? 310 : 0;
  const room = parts.sentence.clientWidth - beside - 36 - left;
  const cell = Math.min(34, room / now.columns, Math.max(4, 600 / now.rows));
  const widest = longest(now.columnLabels);
  const upright = widest + 4 <= cell;
  return {
    cell, left, upright, top: (upright ? 16 : widest) + 8,
    width: cell * now.columns, height: cell * now.rows,
    mirrored: rightToLeft(now.example, now.map.columns),
    every: Math.max(1, Math.ceil(15 / cell)),
  };
}

function drawMap(parts, now) {
  const place = mapPlace(parts, now);
  const context = canvasOf(parts.map, place.left + place.width + 1, place.top + place.height + 1);
  for (const canvas of [parts.map, parts.cross]) {
    canvas.style.width = `${place.left + place.width + 1}px`;
    canvas.style.height = `${place.top + place.height + 1}px`;
  }
  const image = document.createElement("canvas");
  paint(image, { height: now.rows, width: now.columns, weights: now.weights }, now.colour, place.mirrored);
  context.imageSmoothingEnabled = false;
  context.drawImage(image, place.left, place.top, place.width, place.height);
  const style = getComputedStyle(parts.root);
  context.strokeStyle = style.getPropertyValue("--line");
  context.strokeRect(place.left - 0.5, place.top - 0.5, place.width + 1, place.height + 1);
  context.fillStyle = style.getPropertyValue("--ink");
  context.font = LABEL_FONT;
  context.textBaseline = "middle";
  now.rowLabels.forEach((label, row) => {
    if (row % place.every) return;
    context.textAlign = "right";
    context.fillText(shorten(context, label), place.left - 6, place.top + (row + 0.5) * place.cell);
  });
  now.columnLabels.forEach((label, column) => {
    if (column % place.every) return;
    context.save();
    context.translate(columnX(place, now, column), place.top - 6);
    if (!place.upright) context.rotate(-Math.PI / 2);
    context.textAlign = place.upright ? "center" : "left";
    context.textBaseline = place.upright ? "bottom" : "middle";
    context.fillText(shorten(context, label), 0, 0);
    context.restore();
  });
}

function columnX(place, now, column) {
  return place.left + ((place.mirrored ? now.columns - 1 - column : column) + 0.5) * place.cell;
}

/** The label, cut to the largest width of a margin. */
function shorten(context, label) {
  if (context.measureText(label).width <= LABEL_WIDTH) return label;
  let text = [...label];
  while (text.length > 1 && context.measureText(`${text.join("")}…`).width > LABEL_WIDTH) text = text.slice(0, -1);
  return `${text.join("")}…`;
}

function drawCross(parts, now) {
  const place = mapPlace(parts, now);
  const context = canvasOf(parts.cross, place.left + place.width + 1, place.top + place.height + 1);
  const { row, column } = now.state.focus ?? {};
  context.strokeStyle = getComputedStyle(parts.root).getPropertyValue("--ink");
  context.lineWidth = 1.5;
  if (row !== undefined) context.strokeRect(place.left, place.top + row * place.cell, place.width, place.cell);
  if (column !== undefined) {
    context.strokeRect(columnX(place, now, column) - place.cell / 2, place.top, place.cell, place.height);
  }
}

/** The query and the key under the pointer; on a label, only the query or key that it names. */
export function cellAt(parts, now, event) {
  const place = mapPlace(parts, now);
  const box = parts.map.getBoundingClientRect();
  const across = Math.floor((event.clientX - box.left - place.left) / place.cell);
  const row = Math.floor((event.clientY - box.top - place.top) / place.cell);
  if (across >= now.columns || row >= now.rows || (across < 0 && row < 0)) return null;
  const column = place.mirrored ? now.columns - 1 - across : across;
  if (across < 0) return { row };
  return row < 0 ? { column } : { row, column };
}

function drawReading(parts, now) {
  const { row, column } = now.state.focus ?? {};
  const name = (label) => element("bdi", {}, label);
  const number = (weight) => element("span", { class: "number" }, readable(weight));
  if (row === undefined && column === undefined) {
    parts.reading.replaceChildren(
      element("h2", {}, "Reading"),
      element("p", { class: "quiet" }, "Point at a token to see what it looked at, or who looked at it. The lines join each query with the key it looked at most."),
    );
    return;
  }
  if (row !== undefined && column !== undefined) {
    parts.reading.replaceChildren(
      element("h2", {}, "One weight"),
      element("p", {}, element("b", {}, name(now.rowLabels[row])), " looks at ", element("b", {}, name(now.columnLabels[column]))),
      element("p", { class: "weight" }, number(now.weights[row * now.columns + column])),
      element("p", { class: "quiet" }, `query ${row}, key ${column}`),
    );
    return;
  }
  const looking = row !== undefined;
  const weights = looking ? rowOf(now.weights, now.columns, row) : columnOf(now.weights, now.columns, column);
  const partners = looking ? now.columnLabels : now.rowLabels;
  const { top, others, sum } = strongest(weights, SHOWN);
  parts.reading.replaceChildren(
    element("h2", {}, looking ? "What it looks at" : "Who looks at it"),
    element("p", {}, element("b", {}, name(looking ? now.rowLabels[row] : now.columnLabels[column])), ` (${looking ? "query" : "key"} ${row ?? column})`),
    element("ol", {}, ...top.map(({ index, weight }) => {
      const item = element("li", {}, name(partners[index]), element("small", {}, index), number(weight));
      item.style.setProperty("--share", Math.min(1, weight / now.top));
      return item;
    })),
    element("p", { class: "quiet" }, others ? `${others} more share ${readable(sum)}` : ""),
  );
}
