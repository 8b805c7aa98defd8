// The atlas in a browser: the heads of a model over one corpus, or over two side by side.

import { drawDistribution, examplesOf, scaleOfExamples } from "./atlas_head.js";
import { csvOfAtlas, foundRows, linkOfAtlas, nameOf, settledAtlas } from "./atlas_numbers.js";
import { headTable } from "./atlas_table.js";
import { decodeBase64, inflate } from "./page_codec.js";
import { download, element } from "./page_dom.js";
import { counted } from "./page_numbers.js";

async function unpacked(text) {
  return JSON.parse(new TextDecoder().decode(await inflate(decodeBase64(text))));
}

/** Draw `data` into `root`, from the state of a link. Returns { ready, remove }: a promise of the first picture. */
export function atlas(root, data, options = {}) {
  const layers = new Map(), prefersDark = globalThis.matchMedia?.("(prefers-color-scheme: dark)");
  let table = null, state = null, parts = null, heads = [], turn = 0;

  const changed = (change) => {
    state = settledAtlas(data, table, { ...state, ...change });
    options.onLink?.(linkOfAtlas(table, state));
    return draw();
  };
  const rows = headTable({
    sort: (sort) => changed(sort === state.sort ? { up: !state.up } : { sort, up: sort === "head", ...(table.statistics.includes(sort) ? { statistic: sort } : {}) }),
    head: (head) => changed({ head }),
  });

  function build() {
    const button = (text, onclick) => element("button", { type: "button", onclick }, text);
    const limit = (label, name) => {
      const input = element("input", { type: "number", step: "any", onchange: ({ target }) => changed({ [name]: target.value }) });
      return Object.assign(element("label", {}, label, input), { input });
    };
    const tick = element("input", { type: "checkbox", onchange: ({ target }) => changed({ changed: target.checked }) });
    parts = {
      statistic: element("select", { onchange: ({ target }) => changed({ statistic: target.value, ...(table.changes ? {} : { sort: target.value }) }) },
        ...table.statistics.map((name) => element("option", { value: name }, name))),
      from: limit("From", "from"), to: limit("To", "to"), tick, found: element("small", { role: "status" }),
      title: element("h2", {}), canvas: element("canvas", { role: "img" }), legend: element("p", { class: "legend" }), scale: element("div", {}),
      examples: element("div", { class: "folders", "data-count": data.names.length }),
    };
    const more = element("details", { class: "more" }, element("summary", {}, "More"), element("div", {},
      element("div", { class: "buttons" }, "Save the heads of the table: ", button("CSV", () => download("heads.csv", new Blob([csvOfAtlas(table, heads)], { type: "text/csv" })))),
      button("Light or dark", () => changed({ theme: theme() === "dark" ? "light" : "dark" })),
      element("p", {}, "A heading sorts by its column, and turns the order. In the table the arrows, Home and End choose a head. The distribution has a logarithmic axis, with a line at each mean. In an example the query has a frame, and the tokens that it looks at most have the colour of their weights."),
      ...(data.note ? [element("p", {}, data.note)] : [])));
    const named = (at) => (data.names.length > 1 ? `${data.names[at]}: ` : "");
    root.classList.add("atlas");
    root.replaceChildren(
      element("header", {}, element("h1", { dir: "auto", title: data.title }, data.title),
        element("div", { class: "choices" }, element("label", {}, "Statistic", parts.statistic), parts.from, parts.to, ...(table.changes ? [element("label", {}, tick, "changed only")] : [])), more,
        element("p", { class: "about" }, [...data.about.map((one, at) => named(at) + one), ...(data.unlike ? [data.unlike] : [])].join(". "))),
      element("section", { class: "list card", "aria-label": "Heads" }, parts.found, rows.frame),
      element("section", { class: "one card", "aria-label": "The chosen head", tabindex: 0 }, parts.title, element("div", { class: "distribution" }, parts.canvas), parts.legend, parts.scale, parts.examples));
  }

  const theme = () => state.theme ?? (prefersDark?.matches ? "dark" : "light");

  /** The examples of the chosen head's layer in each folder, unpacked once. */
  async function examples() {
    const layer = table.heads[state.head][0];
    if (!layers.has(layer)) layers.set(layer, await Promise.all(data.examples.map((of) => (of[layer] ? unpacked(of[layer]) : null))));
    return layers.get(layer);
  }

  async function draw() {
    const mine = (turn += 1);
    root.dataset.theme = theme();
    const sorted = foundRows(table, state, data.names);
    state.head ??= sorted[0] ?? 0;
    if (rows.key !== (rows.key = JSON.stringify([state.statistic, state.sort, state.up, sorted]))) rows.fill(table, state, data.names, sorted);
    heads = sorted;
    rows.mark(state.head);
    rows.reveal(state.head);
    parts.statistic.value = table.statistics[state.statistic];
    for (const name of ["from", "to"]) parts[name].input.value = state[name] ?? "";
    parts.tick.checked = state.changed;
    const count = table.changes?.changed.filter((of) => of[state.statistic]).length;
    parts.found.textContent = `${sorted.length} of ${counted(table.heads.length, "head")}${table.changes ? `; ${count} changed in ${table.statistics[state.statistic]}, by ${100 * data.level} % intervals that hold together` : ""}`;
    const now = { root, data, table, state, theme: theme() };
    parts.title.textContent = `Head ${nameOf(table, state.head)}: ${table.statistics[state.statistic]} over documents`;
    const said = drawDistribution(parts.canvas, now);
    parts.legend.replaceChildren(...said.map((words, at) => element("span", {}, ...(said.length > 1 ? [swatchOf(data.colours[now.theme].heads[at])] : []), words)), element("span", {}, "logarithmic axis, with a line at each mean"));
    parts.scale.replaceChildren(scaleOfExamples(now));
    const found = await examples();
    if (mine !== turn) return;
    parts.examples.replaceChildren(...found.map((of, at) => element("div", {}, element("h3", {}, `${data.names.length > 1 ? `${data.names[at]}: ` : ""}largest ${table.statistics[state.statistic]}`), ...examplesOf(now, of))));
    root.dataset.drawn = "1";
  }

  const again = () => table && draw();
  const ready = unpacked(data.table).then((found) => {
    table = found;
    state = settledAtlas(data, table, options.start ?? {});
    build();
    globalThis.addEventListener?.("resize", again);
    prefersDark?.addEventListener("change", again);
    return draw();
  });
  return {
    ready,
    remove: () => {
      globalThis.removeEventListener?.("resize", again);
      prefersDark?.removeEventListener("change", again);
      root.replaceChildren();
    },
  };
}

function swatchOf(colour) {
  const made = element("span", { class: "swatch", "aria-hidden": "true" });
  made.style.background = colour;
  return made;
}
