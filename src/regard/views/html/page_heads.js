// Every head of every layer as a small picture, in the reader's order.

import { element } from "./page_dom.js";
import { readable } from "./page_numbers.js";
import { foundHeads, foundWords, PATTERNS, placeName } from "./page_words.js";

const AT_ONCE = 16;
const SIDE = 46;

/** The buttons of the heads that the filter lets pass; returns what the filter has found, in words. */
export function fillHeads(holder, now, act) {
  const { maps } = now.example, { kind, sort } = now.state, found = foundHeads(maps, kind, sort);
  holder.replaceChildren(...found.heads.map(({ map, head, value }) => {
    const { layer } = maps[map], number = value === null ? "" : `: ${readable(value)}`;
    const caption = `${layer === "" ? "" : `${layer}.`}${head === "mean" ? "mean" : head}${number}`;
    const said = value === null ? "" : `, ${PATTERNS[sort].named ?? `on ${PATTERNS[sort].where}`} ${readable(value)}`;
    return element("button", {
      type: "button", class: "thumb", "data-map": map, "data-head": head, title: `${placeName(maps[map], head)}${said}. Shift and click shows several.`, "aria-label": `${caption}, ${placeName(maps[map], head)}${said}`,
      onclick: (event) => act({ map, head, added: event.shiftKey || event.ctrlKey || event.metaKey }),
    }, element("canvas", { "aria-hidden": "true" }), element("small", {}, caption));
  }));
  return foundWords(found, sort);
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

/** Scroll the strip to the chosen head, and nothing around it. */
export function revealHead(holder) {
  const thumb = holder.querySelector('.thumb[aria-pressed="true"]');
  if (!thumb) return;
  const [inner, outer] = [thumb.getBoundingClientRect(), holder.getBoundingClientRect()];
  if (inner.left < outer.left || inner.right > outer.right) holder.scrollLeft += inner.left - outer.left - (outer.width - inner.width) / 2;
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
