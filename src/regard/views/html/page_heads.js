// Every head of every layer as a small picture, in the reader's order.

import { element } from "./page_dom.js";
import { readable } from "./page_numbers.js";
import { kinds, namesOfHeads } from "./page_state.js";

export const SORT_NAMES = {
  layer: "layer", entropy: "entropy (nats)", distance: "distance (tokens)", first: "weight on the first key",
  induction: "induction", largest: "largest weight",
};
const AT_ONCE = 16;
const SIDE = 46;

/** The heads of a kind ordered by a statistic, the largest first; those without it come last. */
export function sortedHeads(maps, kind, sort) {
  const all = [];
  for (const { index } of kinds(maps).get(kind)) {
    for (const head of namesOfHeads(maps[index])) all.push({ map: index, head, value: valueOf(maps[index], head, sort) });
  }
  if (sort === "layer") return all;
  const heads = all.filter(({ head }) => head !== "mean");
  return heads.sort((a, b) => (b.value ?? -Infinity) - (a.value ?? -Infinity));
}

function valueOf(map, head, sort) {
  const at = head === "mean" ? map.shape[0] : head;
  if (sort === "layer") return null;
  return (sort === "largest" ? map.largest : map.statistics[sort])?.[at] ?? null;
}

/** The statistics of at least one head of the kind. */
export function knownSorts(maps, kind) {
  const layers = kinds(maps).get(kind).map(({ index }) => maps[index]);
  return Object.keys(SORT_NAMES).filter((sort) => sort === "layer" || sort === "largest" ||
    layers.some((map) => map.statistics[sort]?.some((value) => value !== null)));
}

export function fillHeads(holder, now, act) {
  const { maps } = now.example;
  holder.replaceChildren(...sortedHeads(maps, now.state.kind, now.state.sort).map(({ map, head, value }) => {
    const { layer } = maps[map];
    const named = `${layer === "" ? "" : `layer ${layer}, `}${head === "mean" ? "mean of the heads" : `head ${head}`}`;
    const caption = `${layer === "" ? "" : `${layer}.`}${head === "mean" ? "mean" : head}`;
    const said = value === null ? "" : `, ${SORT_NAMES[now.state.sort]} ${readable(value)}`;
    return element("button", {
      type: "button", class: "thumb", "data-map": map, "data-head": head, title: `${named}${said}`, "aria-label": `${value === null ? caption : `${caption}: ${readable(value)}`}, ${named}${said}`,
      onclick: (event) => act({ map, head, added: event.shiftKey || event.ctrlKey || event.metaKey }),
    }, element("canvas", { "aria-hidden": "true" }), element("small", {}, value === null ? caption : `${caption}: ${readable(value)}`));
  }));
}

export function markHeads(holder, now) {
  for (const thumb of holder.children) {
    const head = thumb.dataset.head === "mean" ? "mean" : Number(thumb.dataset.head);
    const place = now.state.heads.indexOf(head);
    const chosen = Number(thumb.dataset.map) === now.state.map && place >= 0;
    thumb.setAttribute("aria-pressed", String(chosen));
    thumb.style.borderColor = chosen ? (now.several.length > 1 ? now.several[place]?.colour ?? "" : "") : "";
  }
}

/** Draw some thumbnails between two frames, in order, so that a page of many heads stays responsive. */
export function drawHeads(holder, now, weightsOf, painterOf) {
  const waiting = [...holder.children];
  holder.drawing = waiting;
  const some = async () => {
    for (const thumb of waiting.splice(0, AT_ONCE)) {
      const map = now.example.maps[thumb.dataset.map], head = thumb.dataset.head === "mean" ? "mean" : Number(thumb.dataset.head);
      const picture = await weightsOf.thumbnail(map, head);
      if (holder.drawing !== waiting) return;
      if (picture) paintPicture(thumb.firstChild, picture, painterOf(map, head, picture), now.example.labels[map.columns].direction === "rtl");
    }
    if (waiting.length) requestAnimationFrame(some);
    else holder.dataset.drawn = "1";
  };
  return some();
}

/** One dot for each block of a picture, enlarged by the style sheet. */
export function paintPicture(canvas, picture, paint, mirrored) {
  const { rows, columns } = picture, values = picture.largest ?? picture.mean;
  Object.assign(canvas, { width: columns, height: rows });
  Object.assign(canvas.style, { width: `${SIDE}px`, height: `${SIDE}px` });
  const context = canvas.getContext("2d"), image = context.createImageData(columns, rows);
  const dots = new Uint32Array(image.data.buffer), table = Uint32Array.from(paint.colours, (hex) => {
    const bits = parseInt(hex.slice(1), 16);
    return (255 << 24) | ((bits & 255) << 16) | (bits & 0xff00) | (bits >> 16);
  });
  for (let row = 0, at = 0; row < rows; row++) {
    for (let column = 0; column < columns; column++, at++) {
      dots[row * columns + (mirrored ? columns - 1 - column : column)] = table[Math.max(0, paint.step(values[at], row))];
    }
  }
  context.putImageData(image, 0, 0);
}
