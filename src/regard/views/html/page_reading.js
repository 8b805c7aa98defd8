// The reading: values in words. Each is one exact weight with its tokens, or a named statistic of a block.

import { element, labelOf } from "./page_dom.js";
import { blockText, counted, readable } from "./page_numbers.js";
import { unaligned } from "./page_links.js";
import { strongest } from "./page_weights.js";
import { headName } from "./page_words.js";

const SHOWN = 9;
const LOOKERS = 200;

/** The reading of a focus: plain data for the page, the live region, and files. */
export function readingOf(now, cells, blockOf) {
  const { row, column } = now.state.focus ?? {};
  const name = (labels, place) => labelOf(labels, place);
  const base = { title: "Reading", lists: [], short: "", missing: now.weights.missing ?? "" };
  if (row === undefined && column === undefined) {
    const isAlignment = now.state.view === "links" && !now.same && now.several.length === 1 && now.weights.strongestKeys() !== null;
    return { ...base, free: isAlignment ? unaligned(now.weights, now.state.threshold).map((key) => [name(now.columnLabels, key), key]) : null };
  }
  if (row !== undefined && column !== undefined) {
    const found = { ...base, title: "One weight", pair: [name(now.rowLabels, row), name(now.columnLabels, column)] };
    found.place = `query ${row}, key ${column}`;
    found.numbers = now.several.map(({ weights, head }) => ({ head, cell: weights.cell(row, column) }));
    const known = found.numbers.some(({ cell }) => cell?.weight !== undefined);
    if (!known && cells) {
      const { block, value, mean, what } = blockOf(cells, row, column);
      if (what !== "none" && what !== "weight" && Number.isFinite(value)) {
        const named = { largest: "largest", mean: now.signed ? "difference of the means" : "mean" }[what];
        found.block = { value, text: `${named} of ${blockText(block)}` };
        // A weight is a share of its query; in a block the sum is shared by its queries.
        if (what === "largest" && mean !== undefined) found.block.share = mean * (block[3] - block[2]);
      }
    }
    const first = found.numbers[0].cell;
    const said = first?.weight !== undefined ? readable(first.weight) : found.block ? `${readable(found.block.value)}, ${found.block.text}` : base.missing || "not carried";
    found.short = `${found.pair[0]} looks at ${found.pair[1]}: ${said}`;
    return found;
  }
  const looking = row !== undefined, place = row ?? column;
  const found = {
    ...base, title: looking ? "What it looks at" : "Who looks at it",
    token: name(looking ? now.rowLabels : now.columnLabels, place), place: `${looking ? "query" : "key"} ${place}`,
  };
  const partners = looking ? now.columnLabels : now.rowLabels;
  for (const { weights, head, colour } of now.several) {
    const known = looking ? weights.row(place) : weights.column(place);
    const list = { head, colour, kind: known.kind, items: [], rest: "", sum: null };
    if (known.kind !== "none") {
      const { top, others, othersSum, sum } = strongest(known, SHOWN);
      list.items = top.filter(({ weight }) => weight !== 0).map(({ place: at, weight }) => ({ place: at, label: name(partners, at), weight }));
      const zeros = top.length - list.items.length;
      if (known.kind === "all") {
        list.sum = sum;
        const more = others + zeros, left = now.signed ? othersSum : Math.max(0, othersSum);
        if (more) list.rest = sharedBy(more, looking ? "key" : "query", left);
      } else if (looking && known.rest !== null) {
        list.sum = sum + known.rest;
        list.rest = sharedBy(weights.columns - list.items.length, "key", othersSum + known.rest);
      } else list.rest = looking ? "of the keys that are carried" : `of the queries that have it among the keys that are carried`;
      list.sumText = list.sum === null || now.signed ? "" : `sum ${readable(list.sum)}`;
    }
    found.lists.push(list);
  }
  if (!looking && !now.signed) found.lookers = lookersOf(now.weights, place);
  if (looking && !now.signed) found.alternatives = now.example.alternatives?.[now.map.alternatives]?.[place] ?? null;
  const best = found.lists[0].items[0];
  found.short = `${found.token}, ${found.place}: ${best ? `${looking ? "most at" : "most from"} ${best.label}, ${readable(best.weight)}` : base.missing || "not carried"}`;
  return found;
}

function sharedBy(count, noun, weight) {
  return `${counted(count, `more ${noun}`)} ${count === 1 ? "has" : "share"} ${readable(weight)}`;
}

/** The queries with this strongest key; null if unknown. */
export function lookersOf(weights, key) {
  const found = [], keys = weights.knowsRows ? weights.strongestKeys() : null;
  if (keys === null) return null;
  for (let query = 0; query < keys.length; query++) if (keys[query] === key) found.push(query);
  return found;
}

export function drawReading(holder, found, now, act) {
  const name = (text) => element("bdi", {}, text);
  const quiet = (text) => element("p", { class: "quiet" }, text);
  const many = now.several.length > 1;
  const parts = [element("h2", {}, found.title)];
  if (found.title === "Reading") {
    if (found.free) parts.push(element("p", { class: "free" }, `Unaligned, no query's strongest: ${found.free.length ? "" : "none"}`, ...found.free.flatMap(([label, key], at) => [at ? ", " : "", name(label), ` (${key})`])));
    parts.push(quiet(now.state.view === "links" ? "Point at a token; click to keep it. Without a choice, lines join each query with its strongest key." : "Point at a token or a cell to read its weights; click to keep it."), quiet(now.about));
  } else if (found.pair) {
    parts.push(element("p", {}, element("b", {}, name(found.pair[0])), " looks at ", element("b", {}, name(found.pair[1]))));
    for (const { head, cell } of found.numbers) {
      const label = many ? `${headName(head)}: ` : "";
      if (cell?.weight !== undefined) {
        parts.push(element("p", { class: many ? "" : "weight" }, label, element("span", { class: "number", "data-exact": "" }, readable(cell.weight))));
        if (cell.masked) parts.push(quiet("masked: the query may not see this key"));
      } else if (cell) parts.push(element("p", {}, label, `at most ${readable(cell.atMost)}`), quiet("not among the strongest keys of this query, which are carried"));
      else if (!found.block) parts.push(element("p", {}, label, found.missing || "not carried"));
    }
    if (found.block) parts.push(element("p", { class: "weight" }, element("span", { class: "number", "data-block": "" }, readable(found.block.value))), quiet(found.block.text));
    if (found.block?.share !== undefined) parts.push(element("p", { class: "quiet" }, "of all that one of these queries looks at, these keys have on average ", element("span", { class: "number", "data-share": "" }, readable(found.block.share))));
    parts.push(quiet(found.place));
  } else {
    parts.push(element("p", {}, element("b", {}, name(found.token)), ` (${found.place})`));
    for (const list of found.lists) {
      if (many) parts.push(element("h3", {}, swatch(list.colour), headName(list.head)));
      if (list.kind === "none") {
        parts.push(quiet(found.missing || "The single weights of this head are not carried; the map shows blocks."));
        continue;
      }
      parts.push(element("ol", {}, ...list.items.map(({ place, label, weight }) => {
        const item = element("li", {}, name(label), element("small", {}, place), element("span", { class: "number", "data-exact": "" }, readable(weight)));
        item.style.setProperty("--share", Math.min(1, Math.abs(weight) / (list.sum || 1)));
        item.addEventListener("click", () => act("goto", place));
        return item;
      })));
      parts.push(quiet([list.rest, list.sumText].filter(Boolean).join("; ")));
    }
    if (found.alternatives) {
      parts.push(element("h3", {}, "Most probable in its place"), element("ol", { class: "alternatives" }, ...found.alternatives.map(([text, probability]) =>
        element("li", {}, name(text), element("small"), element("span", { class: "number" }, readable(probability))))));
    }
    if (found.lookers) {
      const { lookers } = found;
      parts.push(quiet(`It is the strongest key of ${counted(lookers.length, "query")}${lookers.length ? `: ${lookers.slice(0, LOOKERS).join(", ")}${lookers.length > LOOKERS ? ", …" : ""}` : ""}`));
    }
  }
  holder.replaceChildren(...parts);
}

export function swatch(colour) {
  const made = element("i", { class: "swatch" });
  made.style.background = colour;
  return made;
}
