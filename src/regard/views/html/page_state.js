// The state says what is shown. It is one plain object, and every change keeps its indices valid.

import { kinds } from "./page_weights.js";

/** The state at the start, with those wishes of `start` that exist in the data. */
export function initial(data, start) {
  const prefersDark = globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches;
  const state = {
    example: 0, map: 0, kind: "", head: "mean", focus: null, pinned: false, stretch: start.stretch === "1",
    theme: start.theme ?? (prefersDark ? "dark" : "light"),
  };
  const change = { example: Number(start.example ?? 0) };
  for (const name of ["kind", "layer", "head"]) if (name in start) change[name] = start[name];
  Object.assign(state, settled(data, { ...state, example: -1 }, change));
  if ("query" in start) Object.assign(state, { focus: { row: Number(start.query) }, pinned: true });
  if ("key" in start) Object.assign(state, { focus: { ...state.focus, column: Number(start.key) }, pinned: true });
  return state;
}

/** Completes a change so that every index in it exists, since another example may have fewer layers. */
export function settled(data, state, change) {
  const next = { ...state, ...change };
  next.example = clamp(next.example, data.examples.length);
  const { maps, show } = data.examples[next.example];
  const groups = kinds(maps);
  if (!groups.has(next.kind)) next.kind = maps[show].kind;
  const layers = groups.get(next.kind);
  const wanted = change.layer ?? state.layer ?? maps[show].layer;
  const { layer, index } = layers.find((one) => one.layer === wanted) ?? layers.at(-1);
  Object.assign(next, { layer, map: index });
  const heads = maps[index].shape[0];
  next.head = heads === 1 ? 0 : next.head === "mean" ? "mean" : clamp(Number(next.head), heads);
  if (next.example !== state.example || next.kind !== state.kind) Object.assign(next, { focus: null, pinned: false });
  return next;
}

function clamp(index, count) {
  return Math.min(count - 1, Math.max(0, Number.isFinite(index) ? Math.trunc(index) : 0));
}

/** Keyboard shortcuts of the whole page, which work as long as no field has the focus. */
export function shortcut(event, data, state, changed) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("select, input, textarea")) return;
  const { maps } = data.examples[state.example];
  const layers = kinds(maps).get(state.kind);
  const at = layers.findIndex((one) => one.index === state.map);
  const heads = maps[state.map].shape[0];
  const head = state.head === "mean" ? -1 : state.head;
  const change = {
    "]": { example: state.example + 1 },
    "[": { example: state.example - 1 },
    l: { layer: layers[Math.min(at + 1, layers.length - 1)].layer },
    L: { layer: layers[Math.max(at - 1, 0)].layer },
    h: { head: Math.min(head + 1, heads - 1) },
    H: { head: head <= 0 && heads > 1 ? "mean" : head - 1 },
    Escape: { focus: null, pinned: false },
  }[event.key];
  if (!change) return;
  event.preventDefault();
  changed(change);
}
