// The state of the view: one plain object; every change is completed to existing maps, heads and tokens.

import { clamp } from "./page_numbers.js";

export const VIEWS = ["matrix", "links", "compare"];
export const SCALES = ["sqrt", "linear", "log", "row"];
export const SORTS = ["layer", "telling", "previous", "first", "self", "duplicate", "induction", "near", "distance", "sharp", "entropy", "largest"];
export const MOST_HEADS = 8;
const MASKS = ["own", "none", "causal"];

/** The maps of an example by kind ("decoder cross"), each kind with its layers in order. */
export function kinds(maps) {
  const found = new Map();
  maps.forEach((map, index) => {
    if (!found.has(map.kind)) found.set(map.kind, []);
    found.get(map.kind).push({ layer: map.layer, index });
  });
  return found;
}

/** The initial state, with the existing selections of `start` (texts, as in a link). */
export function initial(data, start = {}) {
  const prefersDark = globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches;
  const text = (name, known, otherwise) => (known.includes(start[name]) ? start[name] : otherwise);
  const state = {
    example: -1, kind: "", layer: "", map: 0, heads: [], focus: null, pinned: false, window: null, other: null,
    view: text("view", VIEWS, "matrix"), scale: text("scale", SCALES, "sqrt"), sort: text("sort", SORTS, "layer"),
    side: text("side", ["from", "to"], "from"), withoutSink: start.nosink === "1", threshold: number(start.threshold, 0),
    theme: text("theme", ["light", "dark"], prefersDark ? "dark" : "light"), find: start.find ?? "",
    temperature: number(start.temperature, 1), mask: text("mask", MASKS, "own"), stepping: false,
  };
  const change = { example: number(start.example, 0) };
  for (const name of ["kind", "layer"]) if (name in start) change[name] = start[name];
  const heads = start.heads ?? start.head;
  if (heads !== undefined) change.heads = String(heads).split(",");
  if (start.with !== undefined) change.other = partsOf(start.with);
  const begun = settled(data, state, heads === undefined ? { ...change, heads: null } : change);
  const focus = {};
  if (start.query !== undefined) focus.row = number(start.query, 0);
  if (start.key !== undefined) focus.column = number(start.key, 0);
  const window = start.zoom?.split(/[-x]/).map(Number);
  return settled(data, begun, {
    focus: Object.keys(focus).length ? focus : null, pinned: Object.keys(focus).length > 0,
    window: window?.length === 4 && window.every(Number.isFinite) ? window : null,
  });
}

/** The link to a state, as the part of an address after "#". */
export function linkOf(data, state) {
  const entries = {
    example: data.examples.length > 1 ? state.example : null,
    kind: kinds(data.examples[state.example].maps).size > 1 ? state.kind : null,
    layer: state.layer || null, heads: state.heads.join(","),
    query: state.pinned ? state.focus?.row : null, key: state.pinned ? state.focus?.column : null,
    view: state.view === "matrix" ? null : state.view, zoom: state.window ? zoomText(state.window) : null,
    scale: state.scale === "sqrt" ? null : state.scale, nosink: state.withoutSink ? 1 : null,
    sort: state.sort === "layer" ? null : state.sort, side: state.side === "from" ? null : state.side,
    threshold: state.threshold || null, find: state.find || null, theme: state.themeChosen ? state.theme : null,
    temperature: state.temperature === 1 ? null : state.temperature, mask: state.mask === "own" ? null : state.mask,
    with: state.view === "compare" && state.other ? [state.other.example, state.other.map, state.other.head].join(".") : null,
  };
  const known = Object.entries(entries).filter(([, value]) => value !== null && value !== undefined && value !== "");
  return String(new URLSearchParams(known)).replaceAll("%2C", ",");
}

function zoomText([r0, r1, c0, c1]) {
  const short = (value) => Number(value.toFixed(2));
  return `${short(r0)}-${short(r1)}x${short(c0)}-${short(c1)}`;
}

function partsOf(text) {
  const [example, map, head] = String(text).split(".");
  return { example: number(example, 0), map: number(map, 0), head: head ?? "mean" };
}

/** A number from a text, or the default. */
export function number(text, otherwise) {
  const found = text === "" || text === null || text === undefined ? NaN : Number(text);
  return Number.isFinite(found) ? found : otherwise;
}

/** Complete a change to existing names: another example may have fewer layers or tokens. */
export function settled(data, state, change) {
  const next = { ...state, ...change };
  next.example = index(next.example, data.examples.length);
  const { maps, show } = data.examples[next.example];
  const groups = kinds(maps);
  if (!groups.has(next.kind)) next.kind = maps[show].kind;
  const layers = groups.get(next.kind);
  const wanted = change.layer ?? (state.example === -1 ? maps[show].layer : state.layer);
  const chosen = layers.find((one) => one.layer === String(wanted)) ?? layers.at(-1);
  Object.assign(next, { layer: chosen.layer, map: chosen.index });
  const map = maps[next.map];
  next.heads = next.heads ? headsOf(next.heads, map) : [mostTelling(map) ?? namesOfHeads(map)[0]];
  const [, rows, columns] = map.shape;
  if (change.focus === undefined && (next.example !== state.example || next.kind !== state.kind)) {
    Object.assign(next, { focus: null, pinned: false, window: null });
  }
  if (next.focus) {
    const { row, column } = next.focus;
    next.focus = {};
    if (row !== undefined) next.focus.row = index(row, rows);
    if (column !== undefined) next.focus.column = index(column, columns);
    if (next.focus.row === undefined && next.focus.column === undefined) next.focus = null;
  }
  if (!next.focus) next.pinned = false;
  next.stepping = Boolean(change.stepping) || (state.stepping === true && change.focus === undefined && next.focus !== null);
  if (next.window) next.window = windowWithin(next.window, rows, columns);
  if (next.window && next.pinned && change.focus && !change.window) next.window = windowAround(next.window, next.focus, rows, columns);
  next.threshold = clamp(next.threshold, 0, 1);
  next.temperature = clamp(next.temperature, 0.05, 20);
  // Only recomputed heads are marked as recomputed.
  if (!next.heads.every((head) => canRecompute(map, head))) Object.assign(next, { temperature: 1, mask: "own" });
  if (next.other) {
    const example = index(next.other.example, data.examples.length);
    const place = index(next.other.map, data.examples[example].maps.length);
    next.other = { example, map: place, head: headsOf([next.other.head], data.examples[example].maps[place])[0] };
  }
  if (next.view === "compare" && !next.other) next.other = comparable(data, next);
  return next;
}

/** The initial comparison of a map: the same map of the next sentence, or of the next layer. */
function comparable(data, state) {
  const { maps } = data.examples[state.example];
  const { name } = maps[state.map];
  const others = data.examples.map((_, place) => place).filter((place) => place !== state.example);
  for (const example of others) {
    const map = data.examples[example].maps.findIndex((one) => one.name === name);
    if (map >= 0) return { example, map, head: headsOf([state.heads[0]], data.examples[example].maps[map])[0] };
  }
  const layers = kinds(maps).get(state.kind).map(({ index: place }) => place);
  const map = layers.find((place) => place !== state.map) ?? state.map;
  return { example: state.example, map, head: headsOf([state.heads[0]], maps[map])[0] };
}

/** The heads of a map to choose from: their mean, if the page has it, and each of them. */
export function namesOfHeads(map) {
  return [...(map.mean ? ["mean"] : []), ...Array(map.shape[0]).keys()];
}

/** True if a head's weights can be computed for another temperature and mask; for the mean, of all heads. */
export function canRecompute(map, head) {
  if (!map.factors) return false;
  const { heads } = map.factors;
  return head === "mean" ? Object.keys(heads).length === map.shape[0] : heads[head] !== undefined;
}

function headsOf(wanted, map) {
  const names = namesOfHeads(map);
  const found = wanted.filter((head) => head !== undefined && head !== "")
    .map((head) => (names.includes(head) ? head : index(Number(head), map.shape[0])));
  const some = [...new Set(found)].slice(0, MOST_HEADS);
  return some.length ? some : [names[0]];
}

function windowWithin([r0, r1, c0, c1], rows, columns) {
  const axis = (start, stop, length) => {
    const size = clamp(stop - start, Math.min(2, length), length);
    const from = clamp(start, 0, length - size);
    return [from, from + size];
  };
  const [top, bottom] = axis(r0, r1, rows), [left, right] = axis(c0, c1, columns);
  return bottom - top >= rows && right - left >= columns ? null : [top, bottom, left, right];
}

/** The window, moved to a focus outside of it. */
function windowAround([r0, r1, c0, c1], { row, column }, rows, columns) {
  const axis = (from, to, place) => {
    if (place === undefined || (place >= from && place + 1 <= to)) return [from, to];
    return [place + 0.5 - (to - from) / 2, place + 0.5 + (to - from) / 2];
  };
  return windowWithin([...axis(r0, r1, row), ...axis(c0, c1, column)], rows, columns);
}

/** The head that is shown first: the most telling one, the first of equals; null unless this is known of every head. */
export function mostTelling(map) {
  const known = Array.from({ length: map.shape[0] }, (_, head) => map.statistics.telling?.[head]);
  if (known.some((value) => value === undefined || value === null)) return null;
  return known.indexOf(Math.max(...known));
}

function index(wanted, count) {
  return Number.isFinite(wanted) ? clamp(Math.trunc(wanted), 0, count - 1) : 0;
}

/** The change for a key of the keyboard, wherever the page's focus is, or null. */
export function shortcut(event, data, state) {
  if (event.ctrlKey || event.metaKey || event.altKey || event.target.closest?.("select, input, textarea")) return null;
  const { maps } = data.examples[state.example];
  const layers = kinds(maps).get(state.kind);
  const at = layers.findIndex((one) => one.index === state.map);
  const count = maps[state.map].shape[0];
  const head = state.heads[0] === "mean" ? -1 : state.heads[0];
  return {
    "]": { example: state.example + 1 },
    "[": { example: state.example - 1 },
    l: { layer: layers[Math.min(at + 1, layers.length - 1)].layer },
    L: { layer: layers[Math.max(at - 1, 0)].layer },
    h: { heads: [Math.min(head + 1, count - 1)] },
    H: { heads: [head <= 0 && maps[state.map].mean ? "mean" : Math.max(head - 1, 0)] },
    Escape: { focus: null, pinned: false },
  }[event.key] ?? null;
}
