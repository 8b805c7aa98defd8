// The table of heads: a row for each, a column for each number, sorted by the headings.

import { columnsOf, nameOf } from "./atlas_numbers.js";
import { element } from "./page_dom.js";
import { readable } from "./page_numbers.js";

const signed = (value) => (value > 0 ? `+${readable(value)}` : readable(value).replace("-", "−"));

/** The table; `act.sort(name)` and `act.head(index)` receive what the reader chooses. */
export function headTable(act) {
  const head = element("thead"), body = element("tbody");
  const table = { frame: element("div", { class: "rows", tabindex: -1 }, element("table", {}, element("caption", { class: "live" }, "Heads"), head, body)), heads: [] };

  table.fill = (of, state, names, heads) => {
    const columns = columnsOf(of, state, names), { changes } = of, at = state.statistic;
    const heading = (name, words) => element("th", { scope: "col", "aria-sort": state.sort === name ? (state.up ? "ascending" : "descending") : "none" },
      element("button", { type: "button", onclick: () => act.sort(name) }, words, element("span", { "aria-hidden": "true" }, state.sort === name ? (state.up ? " ▲" : " ▼") : "")));
    head.replaceChildren(element("tr", {}, heading("head", "head"), ...columns.map(({ name, words }) => heading(name, words)), ...(changes ? [element("th", { scope: "col" }, "interval")] : [])));
    const shown = (value, isSigned) => (value === null ? "–" : isSigned ? signed(value) : readable(value));
    const interval = (row) => {
      const [low, high] = [changes.low[row][at], changes.high[row][at]];
      return low === null ? "too few documents" : `${signed(low)} to ${signed(high)}${changes.changed[row][at] ? "" : " (no change)"}`;
    };
    table.heads = heads;
    body.replaceChildren(...heads.map((row) => element("tr", { "data-head": row, onclick: () => act.head(row) },
      element("th", { scope: "row" }, element("button", { type: "button", tabindex: -1 }, nameOf(of, row))),
      ...columns.map(({ value, isSigned }) => element("td", {}, shown(value(row), isSigned))),
      ...(changes ? [element("td", { class: changes.changed[row][at] ? "interval" : "interval same" }, interval(row))] : []))));
  };

  table.mark = (chosen) => {
    const place = Math.max(0, table.heads.indexOf(chosen));
    [...body.children].forEach((row, at) => {
      row.classList.toggle("chosen", table.heads[at] === chosen);
      row.querySelector("button").tabIndex = at === place ? 0 : -1;
      row.querySelector("button").setAttribute("aria-pressed", String(table.heads[at] === chosen));
    });
  };

  /** Scroll to the chosen head, and give it the focus if the table has it. */
  table.reveal = (chosen) => {
    const row = body.children[table.heads.indexOf(chosen)];
    if (!row) return;
    const top = row.offsetTop - head.offsetHeight, { frame } = table;
    if (top < frame.scrollTop || row.offsetTop + row.offsetHeight > frame.scrollTop + frame.clientHeight) frame.scrollTop = Math.max(0, top - frame.clientHeight / 3);
    if (body.contains(body.getRootNode().activeElement)) row.querySelector("button").focus({ preventScroll: true });
  };

  body.addEventListener("keydown", (event) => {
    const from = table.heads.indexOf(Number(event.target.closest("tr").dataset.head)), last = table.heads.length - 1;
    const to = { ArrowDown: Math.min(last, from + 1), ArrowUp: Math.max(0, from - 1), Home: 0, End: last }[event.key];
    if (to === undefined || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    act.head(table.heads[to]);
  });
  return table;
}
