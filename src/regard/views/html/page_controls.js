// The permanent elements of the page: the header, the cards, the controls and their values.

import { element } from "./page_dom.js";
import { headName, knownPatterns, PATTERNS } from "./page_words.js";
import { linksPane } from "./page_links.js";
import { matrixOf } from "./page_matrix.js";
import { readable } from "./page_numbers.js";
import { swatch } from "./page_reading.js";
import { stepOf } from "./page_scale.js";
import { canRecompute, kinds, namesOfHeads, SCALES, VIEWS } from "./page_state.js";
import { textOf } from "./page_text.js";

const VIEW_NAMES = { matrix: "matrix", links: "two columns", compare: "compare" };
const SCALE_NAMES = { sqrt: "square root", linear: "linear", log: "logarithm", row: "each row" };

function choice(label, names, chosen, title = false) {
  const select = element("select", { onchange: (event) => chosen(event.target.value) },
    ...names.map(([value, text]) => element("option", { value }, text)));
  return Object.assign(element("label", { title }, label, select), { select });
}

function tick(label, chosen) {
  const input = element("input", { type: "checkbox", onchange: (event) => chosen(event.target.checked) });
  return Object.assign(element("label", {}, input, label), { input });
}

function slider(label, options, chosen) {
  const input = element("input", { type: "range", ...options, oninput: (event) => chosen(Number(event.target.value)) });
  const output = element("output");
  return Object.assign(element("label", {}, label, input, output), { input, output });
}

const button = (text, act, title = false) => element("button", { type: "button", onclick: act, title }, text);

/** Make them. The parts that depend on the example are filled in later. */
export function build(root, data, act) {
  const { changed } = act;
  const parts = {
    examples: choice("Sentence", data.examples.map(({ title }, at) => [at, title || String(at)]), (value) => changed({ example: Number(value) })),
    kinds: choice("Attention", [], (kind) => changed({ kind })),
    layers: choice("Layer", [], (layer) => changed({ layer })),
    headChoice: choice("Head", [], (head) => changed({ heads: [head === "mean" ? "mean" : Number(head)] })),
    view: choice("View", VIEWS.map((name) => [name, VIEW_NAMES[name]]), (view) => changed({ view })),
    scale: choice("Scale", SCALES.map((name) => [name, SCALE_NAMES[name]]), (scale) => changed({ scale })),
    side: choice("Token", [["from", "looks at"], ["to", "is looked at by"]], (side) => changed({ side, focus: null })),
    sort: choice("Heads", [], (sort) => changed({ sort })),
    other: choice("With", [], (text) => {
      const [example, map, head] = text.split(".");
      changed({ other: { example: Number(example), map: Number(map), head: head === "mean" ? "mean" : Number(head) } });
    }),
    sink: tick("Without the first key", (withoutSink) => changed({ withoutSink })),
    threshold: slider("From weight", { min: 0, max: 1, step: 0.01, value: 0 }, (share) => changed({ threshold: Number((share ** 3).toPrecision(3)) })),
    temperature: slider("Temperature", { min: -2, max: 2, step: 0.1, value: 0 }, (power) => changed({ temperature: Number((2 ** power).toPrecision(3)) })),
    mask: choice("Mask", [["own", "its own"], ["none", "none"], ["causal", "causal"]], (mask) => changed({ mask })),
    find: element("input", { type: "search", placeholder: "token or #5", "aria-label": "Find a token",
      oninput: (event) => act.find(event.target.value, false),
      onkeydown: (event) => event.key === "Enter" && act.find(event.target.value, true) }),
    play: button("Play", act.play, "go through the queries one by one"),
    about: element("p", { class: "about" }), sorted: element("small"),
    caption: element("h2", { class: "caption" }), secondCaption: element("h2", { class: "caption" }), thirdCaption: element("h2", { class: "caption" }),
    queries: textOf("Queries: looking", act.text.row),
    keys: textOf("Keys: looked at", act.text.column),
    matrix: matrixOf("Map: queries down, keys across. Plus and minus zoom, arrows move, 0 shows all.", act.pane),
    second: matrixOf("Map B", act.pane), third: matrixOf("A less B", act.pane),
    links: linksPane(act.pane),
    reading: element("div", { class: "reading", tabindex: 0, role: "region", "aria-label": "Reading" }),
    ramp: element("i"), low: element("span", {}, "0"), top: element("span"), legendText: element("small"),
    heads: element("div", { class: "heads", role: "group", "aria-label": "Every layer and head" }),
    live: element("p", { class: "live", role: "status", "aria-live": "polite" }),
  };
  const dark = () => changed({ theme: root.dataset.theme === "dark" ? "light" : "dark" });
  const more = element("details", { class: "more" }, element("summary", {}, "More"),
    element("div", {}, parts.sink, parts.threshold,
      element("div", { class: "buttons" }, "Save what is seen: ", button("CSV", () => act.save("csv")), button("PNG", () => act.save("png")), button("SVG", () => act.save("svg")),
        button("i-j", () => act.save("pharaoh"), "the strongest key of each query as Pharaoh's source-target pairs"), button("Copy CSV", () => act.save("copy"))),
      button("Light or dark", dark),
      element("p", {}, "Click keeps a token or a cell, Esc lets go. In the text arrows walk. In the map the wheel, + and - zoom, dragging and arrows move, 0 shows all. h H next and last head, l L layer, [ ] sentence. Shift and click on heads shows several."),
      element("p", {}, data.note),
      ...carriedLines(data)));
  parts.panes = element("div", { class: "panes" },
    element("div", { class: "pane" }, parts.caption, parts.matrix.frame),
    element("div", { class: "pane", hidden: true }, parts.secondCaption, parts.second.frame),
    element("div", { class: "pane", hidden: true }, parts.thirdCaption, parts.third.frame));
  parts.texts = element("section", { class: "texts card", "aria-label": "Text" }, element("div", { class: "steps" }, parts.side, parts.find), parts.queries.frame, parts.keys.frame);
  parts.recompute = element("div", { class: "recompute" }, parts.temperature, parts.mask);
  root.replaceChildren(
    element("header", {}, element("h1", { dir: "auto", title: data.title }, data.title), element("div", { class: "choices" }, parts.examples, parts.kinds, parts.layers, parts.headChoice, parts.view, parts.other), more, parts.about),
    parts.texts,
    element("section", { class: "middle card", "aria-label": "Map" }, parts.panes, parts.links.frame),
    element("section", { class: "side card", "aria-label": "Numbers" },
      element("div", { class: "legend" }, parts.low, parts.ramp, parts.top, parts.scale), parts.legendText,
      element("div", { class: "steps" }, button("◀", () => act.step(-1), "the query before"), button("▶", () => act.step(1), "the next query"), parts.play), parts.recompute, parts.reading),
    element("section", { class: "strip card", "aria-label": "Heads" }, element("div", { class: "sorting" }, parts.sort, parts.sorted), parts.heads),
    parts.live,
  );
  parts.examples.hidden = data.examples.length < 2;
  return parts;
}

/** The page's content; a notebook's kernel sends it on request. */
function carriedLines({ carried }) {
  if (!carried) return [];
  const [sizes, ...lines] = carried;
  return [element("p", {}, sizes), element("ul", {}, ...lines.map((line) => element("li", {}, line)))];
}

export function fillControls(parts, data, state) {
  const { maps } = data.examples[state.example], groups = kinds(maps), layers = groups.get(state.kind), map = maps[state.map];
  const options = (list) => list.map(([value, text]) => element("option", { value }, text));
  parts.kinds.select.replaceChildren(...options([...groups.keys()].map((kind) => [kind, kind || "attention"])));
  parts.layers.select.replaceChildren(...options(layers.map(({ layer }) => [layer, layer])));
  const names = namesOfHeads(map).map((head) => [head, head === "mean" ? "mean" : head]);
  parts.headChoice.select.replaceChildren(...options(names));
  parts.sort.select.replaceChildren(...options(knownPatterns(maps, state.kind).map((sort) => [sort, PATTERNS[sort].words])));
  const others = data.examples.flatMap((example, at) => example.maps.flatMap((one, place) => namesOfHeads(one).map((head) =>
    [`${at}.${place}.${head}`, `${data.examples.length > 1 ? `${example.title || at}: ` : ""}${one.name} ${head}`])));
  parts.other.select.replaceChildren(...options(others.slice(0, 3000)));
  parts.kinds.hidden = groups.size < 2;
  parts.layers.hidden = layers.length < 2;
  parts.headChoice.hidden = names.length < 2;
}

export function syncControls(parts, now) {
  const { state } = now;
  for (const [part, value] of [["examples", state.example], ["kinds", state.kind], ["layers", state.layer], ["headChoice", state.heads[0]],
    ["view", state.view], ["scale", state.scale], ["side", state.side], ["sort", state.sort], ["mask", state.mask]]) parts[part].select.value = String(value);
  parts.sink.input.checked = state.withoutSink;
  parts.threshold.input.value = String(Math.cbrt(state.threshold));
  parts.threshold.output.textContent = readable(state.threshold);
  parts.temperature.input.value = String(Math.log2(state.temperature));
  parts.temperature.output.textContent = String(state.temperature);
  parts.side.hidden = !now.same;
  const canChange = now.several.every(({ head }) => canRecompute(now.map, head));
  parts.recompute.hidden = !canChange;
  parts.other.hidden = state.view !== "compare";
  if (state.other) parts.other.select.value = [state.other.example, state.other.map, state.other.head].join(".");
  if (parts.find.value !== state.find && parts.find.getRootNode().activeElement !== parts.find) parts.find.value = state.find;
}

export function drawLegend(parts, now, low) {
  const { state, colours, top } = now, stops = 12;
  const said = state.view === "compare" && now.compared.difference ? ["A less B: orange less, blue more"] : [];
  if (state.scale === "row") said.push("each query up to its own largest weight");
  if (state.withoutSink) said.push("limits without the first key");
  parts.ramp.style.background = `linear-gradient(90deg, ${Array.from({ length: stops }, (_, n) => colours.ramp[stepOf(n / (stops - 1), colours.ramp.length)]).join(", ")})`;
  parts.low.textContent = state.scale === "log" ? readable(low || 0) : "0";
  parts.top.textContent = state.scale === "row" ? "row's largest" : readable(top);
  const colours_ = now.several.length > 1 ? now.several.flatMap(({ head, colour }) => [" ", swatch(colour), headName(head)]) : [];
  parts.legendText.replaceChildren(said.join("; "), ...colours_);
  parts.legendText.hidden = !parts.legendText.textContent;
}
