// The elements of the page, and the events that change the state.

import { element, rightToLeft } from "./page_dom.js";
import { cellAt, current, dark } from "./page_drawing.js";
import { columnOf, kinds, rowOf, strongest } from "./page_weights.js";

/** Make the elements that stay. The parts that depend on the example are filled in later. */
export function build(root, data, state, changed) {
  const select = (name, read) =>
    element("select", { onchange: (event) => changed({ [name]: read(event.target.value), focus: null, pinned: false }) });
  const parts = {
    root,
    examples: select("example", Number),
    kinds: select("kind", String),
    layers: select("layer", String),
    head: select("head", String),
    ramp: element("i"),
    top: element("span"),
    links: element("canvas", { "aria-hidden": "true" }),
    keys: element("div", { class: "tokens", role: "group", "aria-label": "Keys: the tokens looked at" }),
    queries: element("div", { class: "tokens", role: "group", "aria-label": "Queries: the tokens that look" }),
    map: element("canvas", { "aria-hidden": "true" }),
    cross: element("canvas", { "aria-hidden": "true" }),
    mapTitle: element("h2"),
    reading: element("div", { class: "card reading", "aria-live": "polite" }),
    heads: element("div", { class: "heads" }),
  };
  const many = data.examples.length > 1;
  parts.sentence = element(
    "section", { class: "card sentence" }, parts.links,
    element("div", { class: "lines" },
      element("div", { class: "line" }, element("h2", {}, "Keys: looked at"), parts.keys),
      element("div", { class: "line" }, element("h2", {}, "Queries: looking"), parts.queries),
    ),
  );
  parts.frame = element("div", { class: "map" }, parts.map, parts.cross);
  parts.kindField = element("label", {}, "Attention", parts.kinds);
  parts.layerField = element("label", {}, "Layer", parts.layers);
  parts.headField = element("label", {}, "Head", parts.head);
  parts.overview = element("section", { class: "card" }, element("h2", {}, "Every layer and head"), parts.heads);
  const stretch = element("input", {
    type: "checkbox", checked: state.stretch, onchange: (event) => changed({ stretch: event.target.checked }),
  });
  root.replaceChildren(
    element("header", {},
      element("h1", { dir: "auto" }, data.title),
      element("button", { type: "button", onclick: () => changed({ theme: dark(root) ? "light" : "dark" }) }, "Light / dark"),
    ),
    element("div", { class: "controls" },
      ...(many ? [element("label", {}, "Sentence", parts.examples)] : []),
      parts.kindField, parts.layerField, parts.headField,
      element("label", {}, stretch, "Stretch colours"),
      element("div", { class: "legend" }, "0", parts.ramp, parts.top),
    ),
    parts.sentence,
    element("div", { class: "detail" },
      element("section", { class: "card" }, parts.mapTitle, parts.frame),
      parts.reading,
    ),
    parts.overview,
    foot(data),
  );
  data.examples.forEach((example, index) => parts.examples.append(element("option", { value: index }, example.title)));
  listenToMap(parts, state, changed);
  return parts;
}

function foot(data) {
  const key = (name) => element("kbd", {}, name);
  return element("footer", {},
    element("p", {}, "Point at a token; click to keep it. ", key("Tab"), " and ", key("←"), " ", key("→"), " move along a line, ",
      key("↑"), " ", key("↓"), " to its strongest partner, ", key("Enter"), " keeps it, ", key("Esc"), " lets go; ",
      key("h"), " ", key("H"), " next and last head, ", key("l"), " ", key("L"), " layer, ", key("["), " ", key("]"), " sentence."),
    element("p", {}, data.note),
  );
}

export function fillControls(parts, data, state) {
  const { maps } = data.examples[state.example];
  const groups = kinds(maps);
  const layers = groups.get(state.kind);
  const heads = maps[state.map].shape[0];
  const options = (list) => list.map(([value, text]) => element("option", { value }, text));
  parts.kinds.replaceChildren(...options([...groups.keys()].map((kind) => [kind, kind])));
  parts.layers.replaceChildren(...options(layers.map(({ layer }) => [layer, layer])));
  const numbers = Array.from({ length: heads }, (_, head) => [head, head]);
  parts.head.replaceChildren(...options(heads > 1 ? [["mean", "mean of all"], ...numbers] : numbers));
  parts.kindField.hidden = groups.size < 2 && !state.kind;
  parts.layerField.hidden = layers.length < 2;
  parts.headField.hidden = heads < 2;
}

/** The tokens of both lines are buttons. In each line, Tab reaches one of them. */
export function fillTokens(parts, now, changed) {
  const line = (holder, labels, index, side) => {
    holder.dir = rightToLeft(now.example, index) ? "rtl" : "ltr";
    holder.replaceChildren(...labels.map((label, place) => element("button", {
      type: "button", class: "token", tabindex: place ? -1 : 0, title: label.length > 24 ? label : false,
      onpointerenter: (event) => event.pointerType === "mouse" && !now.state.pinned && changed({ focus: { [side]: place } }),
      onpointerleave: () => !now.state.pinned && changed({ focus: null }),
      onfocus: (event) => event.target.matches(":focus-visible") && !now.state.pinned && changed({ focus: { [side]: place } }),
      onclick: () => {
        const again = now.state.pinned && now.state.focus?.[side] === place;
        changed({ focus: again ? null : { [side]: place }, pinned: !again });
      },
      onkeydown: (event) => walk(event, parts, now, side, place, changed),
    }, label)));
  };
  line(parts.keys, now.columnLabels, now.map.columns, "column");
  line(parts.queries, now.rowLabels, now.map.rows, "row");
}

/** Arrow keys move along the line, in its direction on the screen, and across to the strongest partner. */
function walk(event, parts, now, side, place, changed) {
  const holder = side === "row" ? parts.queries : parts.keys;
  const other = side === "row" ? parts.keys : parts.queries;
  const forward = holder.dir === "rtl" ? "ArrowLeft" : "ArrowRight";
  const backward = holder.dir === "rtl" ? "ArrowRight" : "ArrowLeft";
  const across = side === "row" ? "ArrowUp" : "ArrowDown";
  let next;
  if (event.key === forward) next = holder.children[place + 1];
  else if (event.key === backward) next = holder.children[place - 1];
  else if (event.key === "Home") next = holder.firstChild;
  else if (event.key === "End") next = holder.lastChild;
  else if (event.key === across) {
    const { weights, columns } = current(parts);
    const linked = side === "row" ? rowOf(weights, columns, place) : columnOf(weights, columns, place);
    next = other.children[strongest(linked, 1).top[0].index];
  } else return;
  event.preventDefault();
  if (!next) return;
  changed({ pinned: false });
  for (const token of next.parentNode.children) token.tabIndex = token === next ? 0 : -1;
  next.focus();
}

export function fillThumbnails(parts, now, changed) {
  const layers = kinds(now.example.maps).get(now.state.kind);
  const heads = Math.max(...layers.map(({ index }) => now.example.maps[index].shape[0]));
  parts.overview.hidden = layers.length * heads === 1;
  parts.heads.replaceChildren(...layers.map(({ layer, index }) => {
    const count = now.example.maps[index].shape[0];
    const names = count > 1 ? ["mean", ...Array(count).keys()] : [0];
    return element("div", {}, element("span", {}, layer === "" ? "" : `layer ${layer}`), ...names.map((head) =>
      element("button", {
        type: "button", class: "thumb", tabindex: -1, "data-map": index, "data-head": head,
        "aria-label": `layer ${layer}, head ${head}`, title: head === "mean" ? "mean of all heads" : `head ${head}`,
        onclick: () => changed({ layer, head }),
      }, element("canvas"))));
  }));
}

function listenToMap(parts, state, changed) {
  parts.map.addEventListener("pointermove", (event) => state.pinned || changed({ focus: cellAt(parts, current(parts), event) }));
  parts.map.addEventListener("pointerleave", () => state.pinned || changed({ focus: null }));
  parts.map.addEventListener("click", (event) => {
    const focus = cellAt(parts, current(parts), event);
    changed({ focus, pinned: focus !== null });
  });
}
