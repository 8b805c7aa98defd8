// Attention in a browser: render(root, data) draws into an element and changes nothing else in the
// document, so that a saved page and a notebook widget can share it.

import { rightToLeft } from "./page_dom.js";
import { dark, drawAll, paint } from "./page_drawing.js";
import { build, fillControls, fillThumbnails, fillTokens } from "./page_parts.js";
import { initial, settled, shortcut } from "./page_state.js";
import { decodeMap, headWeights, largest, shrink, step } from "./page_weights.js";

// The pixels on a side of a thumbnail, and the number of thumbnails drawn between two frames.
const THUMB = 60;
const AT_ONCE = 12;

/**
 * Draw the examples of `data` into `root`. `start` may say what is shown first, each entry being optional:
 * example, kind, layer, head, query, key (numbers as text), theme, stretch. The returned function
 * removes everything again.
 */
export function render(root, data, start = {}) {
  const state = initial(data, start);
  const weights = reader();
  const parts = build(root, data, state, changed);
  const filled = {};

  /** All values that drawing needs, computed from the state. */
  function view() {
    const example = data.examples[state.example];
    const map = example.maps[state.map];
    const shown = weights.head(map, state.head);
    const [, rows, columns] = map.shape;
    const top = state.stretch ? largest(shown) || 1 : map.top;
    const ramp = dark(root) ? data.colours.dark : data.colours.light;
    return {
      example, map, rows, columns, top, ramp, state,
      weights: shown,
      rowLabels: example.labels[map.rows],
      columnLabels: example.labels[map.columns],
      colour: (weight) => ramp[step(weight, top, ramp.length)],
    };
  }

  /** Every event ends here: change the state, then draw what depends on it. */
  function changed(change) {
    Object.assign(state, settled(data, state, change));
    draw();
  }

  function draw() {
    root.dataset.theme = state.theme;
    const now = view();
    const { example, kind, theme } = state;
    const renewed = (part, ...key) => filled[part] !== (filled[part] = key.join(" "));
    if (renewed("example", example)) weights.forget(now.example);
    if (renewed("controls", example, state.map)) fillControls(parts, data, state);
    // Tokens are kept while their labels do not change, so that the keyboard focus stays where it is.
    if (renewed("tokens", example, now.map.rows, now.map.columns)) fillTokens(parts, now, changed);
    if (renewed("heads", example, kind)) fillThumbnails(parts, now, changed);
    if (renewed("thumbs", example, kind, theme)) drawThumbnails(parts, now, weights);
    drawAll(parts, now);
  }

  draw();
  const sizes = new ResizeObserver(draw);
  sizes.observe(parts.sentence);
  const keys = (event) => shortcut(event, data, state, changed);
  root.ownerDocument.addEventListener("keydown", keys);
  return () => {
    sizes.disconnect();
    root.ownerDocument.removeEventListener("keydown", keys);
    root.replaceChildren();
  };
}

/** Decodes each map of an example when it is first needed, and keeps the result. */
function reader() {
  const maps = new Map();
  let last = {};
  const values = (map) => {
    if (!maps.has(map)) maps.set(map, decodeMap(map));
    return maps.get(map);
  };
  return {
    head(map, head) {
      if (last.map !== map || last.head !== head) last = { map, head, weights: headWeights(values(map), map.shape, head) };
      return last.weights;
    },
    forget(example) {
      for (const map of maps.keys()) if (!example.maps.includes(map)) maps.delete(map);
    },
  };
}

/** Draws a few thumbnails between two frames, so that a page of 144 heads reacts before all of them are drawn. */
function drawThumbnails(parts, now, weights) {
  const waiting = [...parts.heads.querySelectorAll(".thumb")];
  const some = () => {
    // Another example, kind or theme was chosen, and its own drawing has begun.
    if (parts.heads.drawn !== waiting) return;
    for (const button of waiting.splice(0, AT_ONCE)) {
      const map = now.example.maps[button.dataset.map];
      const head = button.dataset.head === "mean" ? "mean" : Number(button.dataset.head);
      const small = shrink(weights.head(map, head), map.shape[1], map.shape[2], THUMB);
      const colour = (weight) => now.ramp[step(weight, map.top, now.ramp.length)];
      paint(button.firstChild, small, colour, rightToLeft(now.example, map.columns));
    }
    if (waiting.length) requestAnimationFrame(some);
  };
  parts.heads.drawn = waiting;
  some();
}
