// The table of an atlas: its columns, filters, order, link and CSV. This file does not use the DOM.

import { clamp, csvLine } from "./page_numbers.js";

const THEMES = ["light", "dark"];

/** "3.7": layer 3, head 7. */
export function nameOf(table, head) {
  return table.heads[head].join(".");
}

/**
 * The columns of numbers: the means of every statistic, or of two folders those of one statistic and their difference.
 * Each has a name for links, words, and the value of a head, or null.
 */
export function columnsOf(table, state, names) {
  const { of, changes } = table;
  if (!changes) return table.statistics.map((name, at) => ({ name, words: name, value: (head) => of[0].mean[head][at] }));
  const at = state.statistic;
  return [
    { name: "before", words: names[0], value: (head) => of[0].mean[head][at] },
    { name: "after", words: names[1], value: (head) => of[1].mean[head][at] },
    { name: "difference", words: "difference", value: (head) => changes.difference[head][at], isSigned: true },
  ];
}

/** The heads that pass the filter, in the order of the state. A head without the number comes last. */
export function foundRows(table, state, names) {
  const { of, changes } = table, at = state.statistic;
  const inside = (value) => value !== null && value >= (state.from ?? value) && value <= (state.to ?? value);
  const passes = (head) => ((state.from === null && state.to === null) || of.some(({ mean }) => inside(mean[head][at])))
    && (!state.changed || !changes || changes.changed[head][at]);
  const heads = table.heads.map((_, head) => head).filter(passes);
  const column = columnsOf(table, state, names).find(({ name }) => name === state.sort);
  if (!column) return state.up ? heads : heads.reverse();
  const key = (head) => {
    const value = column.value(head);
    if (value === null) return Infinity;
    return (column.isSigned ? Math.abs(value) : value) * (state.up ? 1 : -1);
  };
  return heads.sort((one, other) => key(one) - key(other) || one - other);
}

/** A state that exists, from a wished one, such as that of a link. */
export function settledAtlas(data, table, wish) {
  const { statistics, heads, changes } = table;
  const number = (value) => (value === null || value === undefined || value === "" || !Number.isFinite(Number(value)) ? null : Number(value));
  const named = statistics.indexOf(wish.statistic);
  const statistic = named >= 0 ? named : typeof wish.statistic === "number" ? clamp(wish.statistic, 0, statistics.length - 1) : mostChanged(table);
  const columns = columnsOf(table, { statistic }, data.names).map(({ name }) => name);
  const sort = ["head", ...columns].includes(wish.sort) ? wish.sort : changes ? "difference" : statistics[statistic];
  const head = typeof wish.head === "number" ? wish.head : heads.findIndex((one) => one.join(".") === wish.head);
  return {
    statistic, sort, up: [true, "1"].includes(wish.up), from: number(wish.from), to: number(wish.to),
    changed: [true, "1"].includes(wish.changed) && Boolean(changes), head: head >= 0 && head < heads.length ? head : null,
    theme: THEMES.includes(wish.theme) ? wish.theme : null,
  };
}

/** The statistic in which most heads changed; of one folder the first. */
function mostChanged({ statistics, changes }) {
  if (!changes) return 0;
  const counts = statistics.map((_, at) => changes.changed.filter((of) => of[at]).length);
  return counts.indexOf(Math.max(...counts));
}

/** The state as a link. */
export function linkOfAtlas(table, state) {
  const parts = { ...state, statistic: table.statistics[state.statistic], head: state.head === null ? null : nameOf(table, state.head) };
  const link = new URLSearchParams();
  for (const [name, value] of Object.entries(parts)) if (value !== null && value !== false) link.set(name, value === true ? "1" : String(value));
  return link.toString();
}

/** The heads with all their statistics, as the command line writes them. */
export function csvOfAtlas(table, heads) {
  const { of, changes } = table, text = (value) => value ?? "";
  const title = ["layer", "head", "statistic", "count", "mean", "deviation"];
  if (changes) title.push("other_count", "other_mean", "other_deviation", "difference", "low", "high", "changed");
  const lines = heads.flatMap((head) => table.statistics.map((name, at) => csvLine([
    ...table.heads[head], name, ...of.flatMap(({ count, mean, deviation }) => [count[head][at], text(mean[head][at]), text(deviation[head][at])]),
    ...(changes ? [...["difference", "low", "high"].map((part) => text(changes[part][head][at])), Number(changes.changed[head][at])] : []),
  ])));
  return [csvLine(title), ...lines, ""].join("\r\n");
}

/** The first and the last bin, that after it, in which any head of any folder has a document. */
export function usedBins({ of }, statistic) {
  let first = Infinity, last = 0;
  for (const { histogram } of of) {
    for (const head of histogram) {
      head[statistic].forEach((count, bin) => {
        if (!count) return;
        first = Math.min(first, bin);
        last = Math.max(last, bin + 1);
      });
    }
  }
  return last ? [first, last] : [0, 1];
}
