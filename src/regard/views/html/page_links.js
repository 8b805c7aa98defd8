// Two columns of tokens joined by lines: queries on the left, keys on the right. For alignments and short texts.

import { element, labelOf, shortened, sized, styleOf } from "./page_dom.js";
import { clamp } from "./page_numbers.js";
import { strongest } from "./page_weights.js";

const ROW = 22;
const LINK_FONT = "13px system-ui, 'Noto Sans', sans-serif";
const MOST_LINES = 400;

/** Each query's strongest key with a weight of at least the threshold: [query, key, weight]. */
export function alignment(weights, threshold = 0) {
  const keys = weights.strongestKeys() ?? [], found = [];
  for (let query = 0; query < keys.length; query++) {
    if (keys[query] < 0) continue;
    const { weight } = weights.cell(query, keys[query]);
    if (weight > 0 && weight >= threshold) found.push([query, keys[query], weight]);
  }
  return found;
}

/** The keys that are strongest for no query. */
export function unaligned(weights, threshold = 0) {
  const taken = new Set(alignment(weights, threshold).map(([, key]) => key));
  return Array.from({ length: weights.columns }, (_, key) => key).filter((key) => !taken.has(key));
}

/** The pairs to join: those of the focus; without one, each query and its strongest key. */
export function linksOf(weights, focus, threshold) {
  const { row, column } = focus ?? {};
  if (row !== undefined && column !== undefined) {
    const weight = weights.cell(row, column)?.weight;
    return weight === undefined ? [] : [[row, column, weight]];
  }
  if (row === undefined && column === undefined) return alignment(weights, threshold);
  const known = row !== undefined ? weights.row(row) : weights.column(column);
  if (known.kind === "none") return [];
  return strongest(known, MOST_LINES).top.filter(({ weight }) => weight > 0 && weight >= threshold)
    .map(({ place, weight }) => (row !== undefined ? [row, place, weight] : [place, column, weight]));
}

export function linksPane(act) {
  const canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": "Queries left, keys right, joined by lines" });
  const frame = element("div", { class: "links" }, canvas);
  const pane = { frame, canvas, scroll: 0, now: null, drag: null };

  const overflow = () => Math.max(0, Math.max(pane.now.rowLabels.count, pane.now.columnLabels.count) * ROW + 34 - frame.clientHeight);
  const offset = (count) => {
    const own = Math.max(0, count * ROW + 34 - frame.clientHeight);
    return overflow() ? (pane.scroll / overflow()) * own : 0;
  };

  pane.draw = (now) => {
    pane.now = now;
    const width = frame.clientWidth, height = frame.clientHeight, context = sized(canvas, width, height);
    pane.scroll = clamp(pane.scroll, 0, overflow());
    const column = Math.min(220, width * 0.34), gap = [column, width - column];
    context.font = LINK_FONT;
    context.textBaseline = "middle";
    const [ink, quiet, line] = ["--ink", "--quiet", "--line"].map((name) => styleOf(now.root, name));
    const y = { row: (place) => 34 + place * ROW + ROW / 2 - offset(now.rowLabels.count),
      column: (place) => 34 + place * ROW + ROW / 2 - offset(now.columnLabels.count) };
    context.save();
    context.beginPath();
    context.rect(0, 24, width, height - 24);
    context.clip();
    context.lineCap = "round";
    const { several, state } = now;
    several.forEach(({ weights, colour }, number) => {
      context.strokeStyle = several.length > 1 ? colour : styleOf(now.root, "--accent");
      for (const [query, key, weight] of linksOf(weights, state.focus, state.threshold)) {
        const share = now.share(weight);
        const shift = (number - (several.length - 1) / 2) * 3;
        const [from, to] = [y.row(query) + shift, y.column(key) + shift];
        if ((from < 0 && to < 0) || (from > height && to > height)) continue;
        context.globalAlpha = (state.focus ? 0.2 : 0.15) + 0.75 * share;
        context.lineWidth = 0.8 + 3.2 * share;
        context.beginPath();
        context.moveTo(gap[0] + 4, from);
        context.bezierCurveTo(width / 2, from, width / 2, to, gap[1] - 4, to);
        context.stroke();
      }
    });
    context.globalAlpha = 1;
    const free = new Set(now.rowLabels === now.columnLabels || several.length > 1 ? [] : unaligned(now.weights, state.threshold));
    const labels = (side, texts, x, align) => {
      for (let place = 0; place < texts.count; place++) {
        const at = y[side](place);
        if (at < 20 || at > height + ROW) continue;
        const chosen = state.focus?.[side] === place;
        const text = shortened(context, labelOf(texts, place), column - 26);
        context.font = chosen ? `bold ${LINK_FONT}` : LINK_FONT;
        context.fillStyle = side === "column" && free.has(place) ? quiet : ink;
        context.textAlign = align;
        context.fillText(text, x, at);
        if (side === "column" && free.has(place)) {
          context.fillText("∅", x + context.measureText(text).width + 8, at);
        }
        if (chosen) context.strokeRect(side === "row" ? 2 : gap[1], at - ROW / 2 + 2, column - 4, ROW - 4);
      }
    };
    context.strokeStyle = styleOf(now.root, "--accent");
    labels("row", now.rowLabels, gap[0], "right");
    labels("column", now.columnLabels, gap[1] + 4, "left");
    context.restore();
    context.font = "600 12px system-ui, sans-serif";
    context.fillStyle = quiet;
    context.textAlign = "right";
    context.fillText("queries", gap[0], 12);
    context.textAlign = "left";
    context.fillText(free.size ? "keys (∅: unaligned)" : "keys", gap[1] + 4 - (free.size ? 60 : 0), 12);
    context.strokeStyle = line;
    context.strokeRect(0, 24, width, 0);
    Object.assign(pane, { y, gap });
  };

  const at = (event) => {
    const box = canvas.getBoundingClientRect(), x = event.clientX - box.left, line = event.clientY - box.top - 34;
    const { rowLabels, columnLabels } = pane.now;
    const side = x < pane.gap[0] + 8 ? "row" : x > pane.gap[1] - 8 ? "column" : null;
    if (!side) return null;
    const labels = side === "row" ? rowLabels : columnLabels;
    const place = Math.floor((line + offset(labels.count)) / ROW);
    return place >= 0 && place < labels.count ? { [side]: place } : null;
  };
  canvas.addEventListener("wheel", (event) => {
    if (!overflow()) return;
    event.preventDefault();
    pane.scroll = clamp(pane.scroll + event.deltaY, 0, overflow());
    pane.draw(pane.now);
  }, { passive: false });
  canvas.addEventListener("pointermove", (event) => act("point", at(event)));
  canvas.addEventListener("pointerleave", () => act("leave"));
  canvas.addEventListener("click", (event) => act("choose", at(event)));
  canvas.addEventListener("keydown", (event) => {
    const by = { ArrowDown: ROW, ArrowUp: -ROW, PageDown: 400, PageUp: -400 }[event.key];
    if (!by) return;
    event.preventDefault();
    pane.scroll = clamp(pane.scroll + by, 0, overflow());
    pane.draw(pane.now);
  });
  /** Scroll the query of a focus into view; the key where there is no query. */
  pane.reveal = ({ row, column }) => {
    const [side, place, labels] = row === undefined ? ["column", column, pane.now.columnLabels] : ["row", row, pane.now.rowLabels];
    const at_ = pane.y[side](place);
    if (at_ >= 34 && at_ <= frame.clientHeight - ROW) return;
    const own = Math.max(1, labels.count * ROW + 34 - frame.clientHeight);
    pane.scroll = ((place * ROW + ROW - frame.clientHeight / 2) / own) * overflow();
    pane.draw(pane.now);
  };
  return pane;
}
