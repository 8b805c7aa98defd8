// Attention in a browser: render(root, data, options) draws into an element and changes nothing else in the document,
// so that a saved page and a notebook widget can share it.

import { build, drawLegend, fillControls, syncControls } from "./page_controls.js";
import { download, element, styleOf } from "./page_dom.js";
import { csvOf, pharaohOf, svgOf } from "./page_export.js";
import { drawHeads, fillHeads, markHeads, revealHead } from "./page_heads.js";
import { blockAt } from "./page_matrix.js";
import { counted } from "./page_numbers.js";
import { drawReading, readingOf } from "./page_reading.js";
import { lowOf, shareOf, stepOf } from "./page_scale.js";
import { canRecompute, initial, linkOf, MOST_HEADS, settled, shortcut } from "./page_state.js";
import { aboutHeads, headName, placeName } from "./page_words.js";
import { counterparts, difference, weightReader } from "./page_weights.js";
import { arrayReader } from "./page_worker.js";

const MARKS = 2000;
const STEP_MS = 600;

/**
 * Draw the examples of `data` into `root`. Options, all of them optional:
 *   start      the initial selection, as in a link (texts by name)
 *   onLink     called with the link's text when the selection has changed
 *   onDrawn    called when a state has been drawn
 *   bytesOf    returns the bytes of an array outside the data
 *   reader     makes the reader of the heads' weights from the data and a reader of arrays; in place of `weightReader`
 * Returns { ready, remove, renew, ... }: a promise of the first picture, a function that removes everything again, and
 * one that redraws after new weights.
 */
export function render(root, data, options = {}) {
  const read = arrayReader(data.arrays, options.bytesOf);
  const weightsOf = (options.reader ?? weightReader)(data, read);
  const loaded = new Map();
  let state = initial(data, options.start), turn = 0, last = null, playing = null;
  const act = actions();
  const parts = build(root, data, act);
  const filled = {};

  function changed(change, { replace = true } = {}) {
    if (change.theme) change.themeChosen = true;
    state = settled(data, state, change);
    if (replace && !("focus" in change && !state.pinned && Object.keys(change).length <= 2 && !last?.state.pinned)) options.onLink?.(linkOf(data, state));
    return show();
  }

  /** Show the state: at once if the weights are loaded, else when they are. */
  function show() {
    const mine = (turn += 1);
    const needs = needed();
    const known = needs.map((need) => loaded.get(need.name));
    if (known.every(Boolean)) return draw(known);
    root.dataset.busy = "1";
    return Promise.all(needs.map(async ({ name, load }) => {
      if (!loaded.has(name)) loaded.set(name, await load());
      if (loaded.size > 40) loaded.delete(loaded.keys().next().value);
      return loaded.get(name);
    })).then((all) => (mine === turn ? draw(all) : undefined));
  }

  /** The arrays the state needs: the chosen heads and their comparison; then the orders of labels. */
  function needed() {
    const { maps } = data.examples[state.example], map = maps[state.map];
    const what = state.temperature !== 1 || state.mask !== "own" ? { temperature: state.temperature, mask: state.mask } : null;
    const one = (example, place, head, how) => {
      const of = data.examples[example].maps[place];
      const changed_ = how && canRecompute(of, head) ? how : null;
      return { name: `${example} ${place} ${head} ${JSON.stringify(changed_)}`, load: () => weightsOf(of, head, changed_) };
    };
    const order = (example, place) => ({
      name: `order ${example} ${place}`,
      load: async () => {
        const { order: at } = data.examples[example].labels[place];
        return { order: at === null ? null : [...(await read(at))] };
      },
    });
    const needs = [order(state.example, map.rows), order(state.example, map.columns), ...state.heads.map((head) => one(state.example, state.map, head, what))];
    if (state.view === "compare") {
      const other = data.examples[state.other.example].maps[state.other.map];
      needs.push(order(state.other.example, other.columns), one(state.other.example, state.other.map, state.other.head, null));
    }
    return needs;
  }

  /** Draw the controls, the heads, and a text in its own order while arrays are still loading. */
  function begin() {
    const example = data.examples[state.example], map = example.maps[state.map];
    root.dataset.theme = state.theme;
    root.dataset.view = state.view;
    fillControls(parts, data, state);
    parts.sorted.textContent = fillHeads(parts.heads, { example, state }, act.head);
    const labels = example.labels[map.columns];
    if (labels.order === null) {
      parts.keys.fill(labels, null);
      parts.keys.draw({ root, state }, { paintOf: null, marks: [], focus: null, found: null, last: Infinity });
    }
  }

  /** All inputs of drawing, computed from the state. */
  function view([rowOrder, columnOrder, ...read_]) {
    const example = data.examples[state.example], map = example.maps[state.map], isDark = state.theme === "dark";
    const colours = { ...data.colours[state.theme], card: styleOf(root, "--card"), ink: styleOf(root, "--ink") };
    const several = state.heads.map((head, place) => ({ head, weights: read_[place], colour: colours.heads[place % colours.heads.length] }));
    const at = state.heads[0] === "mean" ? map.shape[0] : state.heads[0];
    const top = read_[0].largest || (state.withoutSink ? map.withoutSink : map.largest)[at] || map.largest[at] || 1;
    const now = {
      root, data, state, example, map, several, weights: several[0].weights, top, isDark, colours,
      rowLabels: example.labels[map.rows], columnLabels: example.labels[map.columns],
      rowOrder: rowOrder.order, columnOrder: columnOrder.order, same: map.rows === map.columns,
      share: (weight) => shareOf(weight, top, state.scale === "row" ? "linear" : state.scale, filled.low || undefined),
      about: `${counted(map.shape[0], "head")} of ${counted(map.shape[1], "query")} and ${counted(map.shape[2], "key")}.`,
      changedBy: state.temperature !== 1 || state.mask !== "own",
    };
    if (state.view === "compare") now.compared = comparedWith(now, read_.at(-2).order, read_.at(-1));
    return now;
  }

  function comparedWith(now, columnOrder, weights) {
    const { example, map, head } = state.other, of = data.examples[example], entry = of.maps[map];
    const same = weights.rows === now.weights.rows && weights.columns === now.weights.columns;
    const rowLabels = of.labels[entry.rows], columnLabels = of.labels[entry.columns];
    const to = same ? null : { row: counterparts(now.rowLabels, rowLabels), column: counterparts(now.columnLabels, columnLabels) };
    const hasSome = same || (to.row.some((place) => place >= 0) && to.column.some((place) => place >= 0));
    const focus = state.focus && Object.fromEntries(Object.entries(state.focus).map(([side, place]) => [side, to ? to[side][place] : place]));
    return {
      same, focus: focus && Object.values(focus).some((place) => place < 0) ? null : focus,
      name: `${placeName(entry, head)}${of === now.example ? "" : ` in “${of.title}”`}`,
      weights, head, example: of, map: entry, rowLabels, columnLabels, columnOrder,
      top: entry.largest[head === "mean" ? entry.shape[0] : head] || 1,
      difference: hasSome ? difference(now.weights, weights, to?.row, to?.column) : null,
    };
  }

  /** The colours of values: of weights from 0 up, or of differences on both sides of 0. */
  function painter(now, { signed = false, top = now.top } = {}) {
    return (cells) => {
      const { state: { scale, threshold, withoutSink } } = now;
      if (signed) {
        const colours = now.colours.diverging, most = cells.values.reduce((found, value) => Math.max(found, Math.abs(value) || 0), 0) || 1;
        const step = (value) => (Math.abs(value) < threshold ? -1 : stepOf((Math.sign(value) * shareOf(Math.abs(value), most, scale === "linear" ? "linear" : "sqrt") + 1) / 2, colours.length));
        return { colours, paper: colours[(colours.length - 1) / 2], step, top: most };
      }
      const colours = now.colours.ramp;
      let tops = null;
      if (scale === "row") {
        tops = rowTops(cells.values, cells.columns.length - 1, withoutSink && cells.columns[0] === 0);
      }
      const low = scale === "log" ? lowOf(cells.values, top) : 0;
      if (top === now.top) filled.low = low;
      const step = (value, row) => (value < threshold ? -1 : stepOf(shareOf(value, tops ? tops[row] : top, scale, low), colours.length));
      return { colours, paper: colours[0], step, top };
    };
  }

  function thumbPainter(now) {
    return (map, head, picture) => {
      const at = head === "mean" ? map.shape[0] : head;
      const top = (state.withoutSink ? map.withoutSink : map.largest)[at] || 1;
      const values = picture.largest ?? picture.mean, { scale } = state;
      const tops = scale === "row" ? rowTops(values, picture.columns, state.withoutSink) : null;
      const low = scale === "log" ? lowOf(values, top) : 0;
      return { colours: now.colours.ramp, step: (value, row) => stepOf(shareOf(value, tops ? tops[row] : top, scale, low), now.colours.ramp.length) };
    };
  }

  function draw(all) {
    delete root.dataset.busy;
    root.dataset.theme = state.theme;
    root.dataset.view = state.view;
    const now = view(all), isFirst = last === null;
    last = now;
    const { example, kind } = state;
    const renewed = (part, ...key) => filled[part] !== (filled[part] = key.join(" "));
    if (renewed("controls", example, state.map)) fillControls(parts, data, state);
    if (renewed("heads", example, kind, state.sort)) parts.sorted.textContent = fillHeads(parts.heads, now, act.head);
    if (renewed("thumbs", example, kind, state.sort, state.theme, state.scale, state.withoutSink)) drawHeads(parts.heads, now, weightsOf, thumbPainter(now));
    syncControls(parts, now);
    drawAbout(now);
    markHeads(parts.heads, now);
    if (renewed("strip", example, state.map, state.heads, state.sort, parts.heads.clientWidth)) revealHead(parts.heads);
    drawMiddle(now);
    drawTexts(now);
    const sizes = [parts.keys.scroller, parts.queries.scroller, parts.links.frame].map(({ clientWidth, clientHeight }) => [clientWidth, clientHeight]);
    if (renewed("revealed", state.pinned && JSON.stringify(state.focus), example, state.map, state.view, sizes) && state.pinned) revealFocus(now);
    const cells = parts.matrix.cells;
    const found = readingOf(now, cells, blockAt);
    drawReading(parts.reading, found, now, act.go);
    if (now.compared) parts.reading.append(...comparedReading(now));
    if (now.changedBy) parts.reading.prepend(element("p", { class: "changed" }, `Recomputed: temperature ${state.temperature}, ${{ own: "its own mask", none: "no mask", causal: "a causal mask" }[state.mask]}. These are not the model's weights.`));
    parts.live.textContent = state.pinned ? found.short : "";
    drawLegend(parts, now, filled.low);
    if (isFirst) globalThis.performance?.mark("regard-drawn");
    options.onDrawn?.();
  }

  /** Scroll the kept tokens into view, in the texts and in the two columns. */
  function revealFocus(now) {
    const { row, column } = state.focus;
    parts.reading.scrollTop = 0;
    if (column !== undefined) parts.keys.reveal(column);
    if (row !== undefined) (now.same ? parts.keys : parts.queries).reveal(row);
    if (state.view === "links") parts.links.reveal(state.focus);
  }

  /** What is shown, of which text, by which head. */
  function drawAbout(now) {
    const { named, where, deed } = aboutHeads(state, now.example.maps), { title } = now.example;
    const of = title && title !== data.title ? [", in “", element("bdi", {}, title), "”"] : [];
    const against = now.compared ? `, beside ${now.compared.name}` : "";
    parts.about.replaceChildren(element("b", {}, named), where, ...of, `${against}. ${deed}`);
    parts.about.title = parts.about.textContent;
  }

  // -- the text ------------------------------------------------------------------------------------------

  /** The weights between the focus and the tokens of one side, by head; null without any. */
  function partnersOf(now, side) {
    const { row, column } = state.focus ?? {};
    if (row === undefined && column === undefined) return null;
    if (row !== undefined && column !== undefined) {
      if (side === "row") return null;
      return now.several.map(({ weights }) => ({ kind: "some", places: [column], weights: [weights.cell(row, column)?.weight ?? 0] }));
    }
    if (side === "both" ? false : (side === "column") !== (row !== undefined)) return null;
    return now.several.map(({ weights }) => (row !== undefined ? weights.row(row) : weights.column(column)));
  }

  function drawTexts(now) {
    parts.texts.dataset.same = now.same ? "1" : "0";
    const sides = now.same ? [["both", parts.keys]] : [["row", parts.queries], ["column", parts.keys]];
    parts.queries.frame.hidden = now.same;
    parts.keys.title.textContent = now.same ? "Text" : "Keys: looked at";
    const wanted = state.find.trim();
    for (const [side, text] of sides) {
      const labels = side === "row" ? now.rowLabels : now.columnLabels;
      text.fill(labels, side === "row" ? now.rowOrder : now.columnOrder);
      const found = wanted ? new Set(matches(labels, wanted)) : null;
      const known = partnersOf(now, side), focus = focusOn(now, side);
      const maps = known?.map((one) => (one.kind === "none" ? null : placesOf(one)));
      const paintOf = (place) => {
        if (!maps) return null;
        const shown = maps.map((map, n) => map && [map.get(place) ?? 0, n]).filter(Boolean).filter(([weight]) => Math.abs(weight) > 0 && Math.abs(weight) >= state.threshold);
        if (!shown.length) return null;
        if (now.several.length === 1) return now.colours.ramp[stepOf(now.share(Math.abs(shown[0][0])), now.colours.ramp.length)];
        const clear = shown.filter(([weight]) => now.share(weight) >= 0.15);
        return clear.length ? clear.map(([, n]) => now.several[n].colour) : null;
      };
      const marks = [];
      maps?.forEach((map, n) => {
        if (!map) return;
        const clear = [...map].filter(([, weight]) => now.share(Math.abs(weight)) > 0.12 && Math.abs(weight) >= state.threshold).slice(0, MARKS);
        for (const [place] of clear) marks.push([place, now.several.length > 1 ? now.several[n].colour : styleOf(root, "--accent")]);
      });
      text.draw(now, { paintOf, marks, focus, found, last: lastShown(now, side) });
    }
  }

  /** In a replay query by query, the last written token. */
  function lastShown(now, side) {
    const { row } = state.focus ?? {};
    if (!state.stepping || row === undefined) return Infinity;
    return side === "row" ? row : now.weights.span(row)[1] - 1;
  }

  /** The focused token of a side: in one text for both, a query is at its own position among the keys. */
  function focusOn(now, side) {
    const { row, column } = state.focus ?? {};
    if (side === "both") return row ?? column ?? null;
    return (side === "row" ? row : column) ?? null;
  }

  function matches(labels, wanted) {
    if (!labels.texts) return /^\d+$/.test(wanted) && Number(wanted) < labels.count ? [Number(wanted)] : [];
    const low = wanted.toLowerCase(), found = [];
    const at = /^#(\d+)$/.exec(wanted);
    if (at && Number(at[1]) < labels.count) return [Number(at[1])];
    labels.texts.forEach((text, place) => text.toLowerCase().replaceAll("␣", " ").trim().includes(low) && found.push(place));
    return found;
  }

  // -- the middle ----------------------------------------------------------------------------------------

  function drawMiddle(now) {
    const compared = state.view === "compare";
    parts.links.frame.hidden = state.view !== "links";
    parts.matrix.frame.hidden = state.view === "links";
    parts.panes.hidden = state.view === "links";
    for (const other of [parts.second, parts.third]) other.frame.parentNode.hidden = !compared;
    parts.third.frame.parentNode.hidden = !compared || !now.compared.difference;
    parts.panes.dataset.count = compared ? (now.compared.difference ? 3 : 2) : 1;
    if (state.view === "links") {
      // The matrix gets its caption anew when it is shown again.
      filled.matrix = null;
      parts.caption.textContent = "Lines join queries, left, with the keys that they look at, right";
      return parts.links.draw(now);
    }
    const describe = (holder, what) => (cells) => {
      const blocks = { weight: "each cell is one weight", largest: "each cell is the largest of its block", mean: "each cell is the mean of its block", none: what.weights.missing ?? "not carried" }[cells.what];
      const size = cells.what === "weight" || cells.what === "none" ? "" : ` of up to ${widest(cells.rows)} × ${widest(cells.columns)} weights`;
      const lacks = cells.what === "weight" && cells.values.some(Number.isNaN) ? "; striped: not carried" : "";
      holder.textContent = `${what.name}${blocks}${size}${lacks}`;
      holder.title = holder.textContent;
    };
    const first = { weights: now.weights, name: compared ? `A: ${headName(state.heads[0])}; ` : "Rows look at columns; " };
    const drawn = [state.example, state.map, state.heads[0], state.window, state.scale, state.withoutSink, state.threshold, state.theme,
      state.temperature, state.mask, state.view, JSON.stringify(state.other), parts.matrix.frame.clientWidth, parts.matrix.frame.clientHeight].join(" ");
    if (filled.matrix === drawn) {
      parts.matrix.drawCross(now);
      if (compared) parts.second.drawCross({ ...now, state: { ...state, focus: now.compared.focus } });
      if (compared && now.compared.difference) parts.third.drawCross(now);
      return undefined;
    }
    filled.matrix = drawn;
    parts.matrix.draw(now, {
      ...first, rowLabels: now.rowLabels, columnLabels: now.columnLabels, columnOrder: now.columnOrder, painter: painter(now), says: describe(parts.caption, first),
    });
    if (!compared) return readTiles([parts.matrix]);
    const { compared: other } = now;
    const elsewhere = { ...state, window: other.same ? state.window : null, focus: other.focus };
    const second = { weights: other.weights, name: `B: ${other.name}; ` };
    parts.second.draw({ ...now, state: elsewhere }, {
      ...second, rowLabels: other.rowLabels, columnLabels: other.columnLabels, columnOrder: other.columnOrder, painter: painter(now, { top: other.top }), says: describe(parts.secondCaption, second),
    });
    if (other.difference) {
      const third = { weights: other.difference, name: "A less B; " };
      parts.third.draw(now, {
        ...third, rowLabels: now.rowLabels, columnLabels: now.columnLabels, columnOrder: now.columnOrder, painter: painter(now, { signed: true }), says: describe(parts.thirdCaption, third),
      });
    }
    return readTiles([parts.matrix, parts.second, ...(other.difference ? [parts.third] : [])]);
  }

  /** Load the tiles missing in the maps' windows, and redraw. */
  function readTiles(matrices) {
    for (const matrix of matrices) {
      const { cells } = matrix;
      cells?.load?.().then(() => {
        if (matrix.cells !== cells) return undefined;
        filled.matrix = null;
        return show();
      });
    }
  }

  /** The other side of a comparison at the same focus. */
  function comparedReading(now) {
    const { compared: other } = now;
    const quiet = (text) => element("p", { class: "quiet" }, text);
    if (!other.difference) return [quiet("B has other numbers of tokens, and begins and ends with others: no difference can be drawn.")];
    const said = other.same ? [] : [quiet("B has other numbers of tokens: those with which both begin and end are compared, the others are striped.")];
    if (!state.focus) return said;
    if (!other.focus) return [...said, quiet("What is chosen has no counterpart in B.")];
    const one = { ...now, weights: other.difference, several: [{ head: "A less B", weights: other.difference, colour: "" }], signed: true };
    const two = { ...now, state: { ...state, focus: other.focus }, weights: other.weights, several: [{ head: other.head, weights: other.weights, colour: "" }], rowLabels: other.rowLabels, columnLabels: other.columnLabels };
    const readings = [["In B", two, parts.second.cells], ["A less B", one, parts.third.cells]].map(([title, of, cells]) => {
      const holder = element("div", { class: "other" });
      drawReading(holder, readingOf(of, cells, blockAt), of, act.go);
      holder.querySelector("h2").textContent = title;
      return holder;
    });
    return [...said, ...readings];
  }

  // -- events --------------------------------------------------------------------------------------------

  function actions() {
    const point = (focus) => !state.pinned && changed({ focus });
    const choose = (focus) => {
      const again = state.pinned && focus && JSON.stringify(focus) === JSON.stringify(state.focus);
      return changed({ focus: again ? null : focus, pinned: Boolean(focus) && !again });
    };
    const ofText = (side) => (what, place) => {
      const name = side() === "both" ? (state.side === "from" ? "row" : "column") : side();
      const count = data.examples[state.example].maps[state.map].shape[name === "row" ? 1 : 2];
      const focus = place === undefined || place >= count ? null : { [name]: place };
      if (what === "point") return point(focus);
      if (what === "leave") return point(null);
      if (what === "walk") return changed({ focus, pinned: true });
      return choose(focus);
    };
    const isSame = () => {
      const map = data.examples[state.example].maps[state.map];
      return map.rows === map.columns;
    };
    return {
      changed: (change) => changed(change),
      text: { row: ofText(() => "row"), column: ofText(() => (isSame() ? "both" : "column")) },
      pane: (what, value) => ({ point: () => point(value), leave: () => point(null), choose: () => choose(value), zoom: () => changed({ window: value }) })[what](),
      head: ({ map, head, added }) => {
        const { layer } = data.examples[state.example].maps[map];
        if (!added || map !== state.map) return changed({ layer, heads: [head] });
        const heads = state.heads.includes(head) ? state.heads.filter((one) => one !== head) : [...state.heads, head].slice(-MOST_HEADS);
        return changed({ heads: heads.length ? heads : [head] });
      },
      go: (what, place) => {
        const { row } = state.focus ?? {};
        const side = row !== undefined ? "column" : "row";
        return changed({ focus: { ...state.focus, [side]: place }, pinned: true });
      },
      find: (text, next) => find(text, next),
      step: (by) => step(by),
      play: () => play(),
      zoomTo: (window) => changed({ window }),
      save: (kind) => save(kind),
    };
  }

  function find(text, next) {
    changed({ find: text });
    if (!next || !last) return;
    const labels = last.columnLabels, found = matches(labels, text.trim());
    if (!found.length) {
      parts.live.textContent = `no token matches ${text}`;
      return;
    }
    const name = last.same && state.side === "from" ? "row" : "column";
    const from = state.focus?.[name] ?? -1;
    const place = found.find((one) => one > from) ?? found[0];
    changed({ focus: { [name]: place }, pinned: true });
  }

  /** The next query: a replay of a generation token by token. */
  function step(by) {
    const rows = data.examples[state.example].maps[state.map].shape[1];
    const row = Math.min(rows - 1, Math.max(0, (state.focus?.row ?? -1) + by));
    changed({ focus: { row }, pinned: true, stepping: true });
    return row < rows - 1;
  }

  function play() {
    clearInterval(playing);
    playing = playing === null ? setInterval(() => step(1) || play(), STEP_MS) : null;
    parts.play.textContent = playing === null ? "Play" : "Stop";
  }

  function save(kind) {
    const name = (data.title || "attention").replace(/[^\p{L}\p{N}]+/gu, "-").slice(0, 40) || "attention";
    const text = (content, type, ending) => download(`${name}.${ending}`, new Blob([content], { type }));
    if (kind === "csv") text(csvOf(last, parts.matrix.cells), "text/csv", "csv");
    if (kind === "pharaoh") text(`${pharaohOf(last.weights, state.threshold)}\n`, "text/plain", "align");
    if (kind === "svg") text(svgOf(parts.matrix, last), "image/svg+xml", "svg");
    if (kind === "png") (state.view === "links" ? parts.links : parts.matrix).canvas.toBlob((blob) => download(`${name}.png`, blob));
    if (kind === "copy") navigator.clipboard?.writeText(csvOf(last, parts.matrix.cells));
  }

  /** A kernel knows the heads only when it is asked: without a chosen one, the most telling is known then. */
  async function whenKnown() {
    const { start = {} } = options;
    if (weightsOf.known && start.heads === undefined && start.head === undefined) {
      await weightsOf.known(data.examples[state.example].maps[state.map]);
      if (turn === 0) state = initial(data, start);
    }
    return show();
  }

  begin();
  const ready = weightsOf.known ? whenKnown() : Promise.resolve(show());
  const sizes = new ResizeObserver(() => last && show());
  for (const part of [root, parts.keys.scroller, parts.panes]) sizes.observe(part);
  const keys = (event) => {
    const change = shortcut(event, data, state);
    if (!change) return;
    event.preventDefault();
    changed(change);
  };
  root.addEventListener("keydown", keys);
  return {
    ready,
    remove() {
      clearInterval(playing);
      read.close();
      sizes.disconnect();
      root.removeEventListener("keydown", keys);
      root.replaceChildren();
    },
    state: () => state,
    cells: () => parts.matrix.cells,
    changed,
    decodedIn: read.where,
    /** Redraw after new weights; `numbers` marks statistics that sort heads. */
    renew({ numbers = false } = {}) {
      if (!last) return;
      filled.matrix = null;
      if (numbers) Object.assign(filled, state.sort === "layer" ? { controls: null } : { controls: null, heads: null, thumbs: null });
      show();
    },
    exported: (kind) => ({ csv: () => csvOf(last, parts.matrix.cells), pharaoh: () => pharaohOf(last.weights, state.threshold), svg: () => svgOf(parts.matrix, last) })[kind](),
  };
}

/** The largest distance between consecutive edges. */
function widest(edges) {
  let most = 0;
  for (let at = 1; at < edges.length; at++) most = Math.max(most, edges[at] - edges[at - 1]);
  return most;
}

/** The largest value of each row of a picture; without the first key on request. */
function rowTops(values, across, withoutSink) {
  const tops = new Float32Array(values.length / across);
  for (let at = 0; at < values.length; at++) {
    if (withoutSink && at % across === 0 && across > 1) continue;
    const row = Math.floor(at / across);
    if (values[at] > tops[row]) tops[row] = values[at];
  }
  return tops;
}

/** The loaded weights, by position. */
function placesOf(known) {
  const found = new Map();
  known.weights.forEach((weight, at) => found.set(known.kind === "all" ? at : known.places[at], weight));
  return found;
}
