// The words for heads: their names, their patterns, and the filters by them. This file does not use the DOM.

import { counted, readable } from "./page_numbers.js";
import { kinds, namesOfHeads } from "./page_state.js";

/** The share of its weight from which a head is said to follow a pattern. */
const FOLLOWS = 0.3;
/** "Few" and "near" tokens, and the part of a text that is "many" or "far". */
const FEW = 4, PART = 1 / 4;

/**
 * The orders of heads by name. Each has the words of its choice and a statistic; `least` or `most`, the limit for a
 * head to pass, from the number of keys; and the order: "down" from the largest. Those of `where` are shares of weight.
 */
export const PATTERNS = {
  layer: { words: "all, layer by layer" },
  telling: { words: "all, the most telling first", of: "telling", named: "telling, nats" },
  previous: { words: "that look at the token before", where: "the token before" },
  first: { words: "that look at the first token", where: "the first token" },
  self: { words: "that look at their own token", where: "its own token" },
  duplicate: { words: "that look at an earlier copy (duplicate token)", where: "earlier copies of its token" },
  induction: { words: "that look behind an earlier copy (induction)", where: "the token after an earlier copy of its own" },
  near: { words: "that look near (distance)", of: "distance", named: "mean distance, tokens", most: () => FEW, up: true },
  distance: { words: "that look far (distance)", of: "distance", named: "mean distance, tokens", least: (keys) => PART * keys },
  sharp: { words: "that look at few tokens (low entropy)", of: "entropy", named: "entropy, nats", most: () => Math.log(FEW), up: true },
  entropy: { words: "that look at many tokens (high entropy)", of: "entropy", named: "entropy, nats", least: (keys) => Math.log(PART * keys) },
  largest: { words: "all, the largest weight first", of: "largest", named: "largest weight" },
};

/** "head 3", or "mean of the heads". */
export function headName(head) {
  return head === "mean" ? "mean of the heads" : `head ${head}`;
}

/** "layer 1, head 3": a head of a map. */
export function placeName(map, head) {
  return map.layer === "" ? headName(head) : `layer ${map.layer}, ${headName(head)}`;
}

function statisticOf(map, head, name) {
  const at = head === "mean" ? map.shape[0] : head;
  return (name === "largest" ? map.largest : map.statistics[name])?.[at] ?? null;
}

/** What a head does, in words: the pattern with most of its weight, or how many tokens it looks at; "" if unknown. */
export function deedOf(map, head) {
  const shares = Object.entries(PATTERNS).filter(([, { where }]) => where)
    .map(([name, { where }]) => ({ where, share: statisticOf(map, head, name) ?? 0 }));
  const best = shares.reduce((one, other) => (other.share > one.share ? other : one));
  if (best.share >= FOLLOWS) return `It looks ${best.share >= 0.5 ? "mostly" : "often"} at ${best.where}, with ${readable(best.share)} of its weight.`;
  const entropy = statisticOf(map, head, "entropy");
  return entropy === null ? "" : `It spreads its weight over about ${counted(Math.round(Math.exp(entropy)), "token")}.`;
}

/** The title of the view: which heads of which attention, and what a single one does. */
export function aboutHeads(state, maps) {
  const { heads } = state, map = maps[state.map];
  const kind = kinds(maps).size < 2 ? "" : /attention/i.test(map.kind) ? map.kind : `${map.kind} attention`;
  const named = heads.length > 1 ? `heads ${heads.join(", ")}` : headName(heads[0]);
  const where = [map.layer === "" ? "" : `layer ${map.layer}`, kind].filter(Boolean).join(", ");
  const deed = heads.length > 1 || state.temperature !== 1 || state.mask !== "own" ? "" : deedOf(map, heads[0]);
  return { named: named[0].toUpperCase() + named.slice(1), where: where && ` of ${where}`, deed };
}

/** The heads of a kind that pass a filter, in its order; all of them if none passes. `passed` is null without a limit. */
export function foundHeads(maps, kind, sort) {
  const all = [], { of = sort, where, least = where && (() => FOLLOWS), most, up } = PATTERNS[sort];
  for (const { index } of kinds(maps).get(kind)) {
    for (const head of namesOfHeads(maps[index])) all.push({ map: index, head, value: sort === "layer" ? null : statisticOf(maps[index], head, of) });
  }
  if (sort === "layer") return { heads: all, of: all.length, passed: null };
  const single = all.filter(({ head }) => head !== "mean"), last = up ? Infinity : -Infinity;
  const heads = single.sort((a, b) => (up ? 1 : -1) * ((a.value ?? last) - (b.value ?? last)));
  if (!least && !most) return { heads, of: heads.length, passed: null };
  const passes = ({ map, value }) => value !== null && value >= (least?.(maps[map].shape[2]) ?? value) && value <= (most?.(maps[map].shape[2]) ?? value);
  const passing = heads.filter(passes);
  return { heads: passing.length ? passing : heads, of: heads.length, passed: passing.length };
}

/** What a filter has found, in words. */
export function foundWords({ of, passed }, sort) {
  if (passed === null) return "";
  const { where } = PATTERNS[sort];
  const limit = where ? `, with ${readable(FOLLOWS)} of their weight or more` : "";
  return passed ? `${passed} of ${counted(of, "head")}${limit}` : `none of ${counted(of, "head")} does: all, the nearest first`;
}

/** The orders with a statistic of at least one head of the kind. */
export function knownPatterns(maps, kind) {
  const layers = kinds(maps).get(kind).map(({ index }) => maps[index]);
  const known = (of) => layers.some((map) => (of === "largest" ? map.largest : map.statistics[of])?.some((value) => value !== null));
  return Object.keys(PATTERNS).filter((sort) => sort === "layer" || known(PATTERNS[sort].of ?? sort));
}
