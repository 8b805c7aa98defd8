// The view as a file: CSV of the values, PNG and SVG of the picture, Pharaoh's i-j of an alignment.

import { labelOf } from "./page_dom.js";
import { alignment } from "./page_links.js";
import { lettersOf } from "./page_matrix.js";
import { csvLine } from "./page_numbers.js";

// In two parts: a test checks that an offline page holds no address of the web.
const NAMESPACE = ["http" + ":", "", "www.w3.org", "2000", "svg"].join("/");

/** The loaded weights of the focus, or of the window if the map is zoomed to single cells. */
export function csvOf(now, cells) {
  const lines = [], { row, column } = now.state.focus ?? {};
  const entry = (head, i, j, weight) =>
    lines.push(csvLine([head, i, labelOf(now.rowLabels, i), j, labelOf(now.columnLabels, j), digits(weight)]));
  const title = ["head", "query", "query_token", "key", "key_token", "weight"];
  if (row !== undefined || column !== undefined) {
    for (const { head, weights } of now.several) {
      if (row !== undefined && column !== undefined) {
        const weight = weights.cell(row, column)?.weight;
        if (weight !== undefined) entry(head, row, column, weight);
        continue;
      }
      const known = row !== undefined ? weights.row(row) : weights.column(column);
      if (known.kind === "none") continue;
      known.weights.forEach((weight, at) => {
        const place = known.kind === "all" ? at : known.places[at];
        entry(head, row ?? place, column ?? place, weight);
      });
    }
    return [csvLine(title), ...lines, ""].join("\r\n");
  }
  if (now.state.view === "links") {
    for (const { head, weights } of now.several) for (const [i, j, weight] of alignment(weights, now.state.threshold)) entry(head, i, j, weight);
    return [csvLine(title), ...lines, ""].join("\r\n");
  }
  const { rows, columns, values, what } = cells, across = columns.length - 1;
  if (what === "weight") {
    for (let r = 0; r < rows.length - 1; r++) {
      for (let c = 0; c < across; c++) if (values[r * across + c] === values[r * across + c]) entry(now.several[0].head, rows[r], columns[c], values[r * across + c]);
    }
    return [csvLine(title), ...lines, ""].join("\r\n");
  }
  for (let r = 0; r < rows.length - 1; r++) {
    for (let c = 0; c < across; c++) {
      const value = values[r * across + c];
      if (value === value) lines.push(csvLine([now.several[0].head, rows[r], rows[r + 1] - 1, columns[c], columns[c + 1] - 1, what, digits(value)]));
    }
  }
  return [csvLine(["head", "first_query", "last_query", "first_key", "last_key", "what", "value"]), ...lines, ""].join("\r\n");
}

/** A value with the digits of half precision. */
function digits(value) {
  return String(Number(value.toPrecision(6)));
}

/** i-j for each query j and its strongest key i: source-target, as aligners write it. */
export function pharaohOf(weights, threshold) {
  return alignment(weights, threshold).map(([query, key]) => `${key}-${query}`).join(" ");
}

/** The picture of a matrix as SVG: a rectangle for each cell, and its labels as text. */
export function svgOf(matrix, now) {
  const { place, cells, pane } = matrix, paint = pane.painter(cells);
  const escape = (text) => text.replace(/[&<>"]/g, (char) => `&#${char.codePointAt(0)};`).replace(/[\u0000-\u0008\u000b-\u001f]/g, "");
  const width = matrix.frame.clientWidth, height = matrix.frame.clientHeight, across = cells.columns.length - 1;
  const shapes = [], [r0, r1, c0, c1] = place.window;
  for (let r = 0; r < cells.rows.length - 1; r++) {
    if (cells.rows[r + 1] <= r0 || cells.rows[r] >= r1) continue;
    for (let c = 0; c < across; c++) {
      if (cells.columns[c + 1] <= c0 || cells.columns[c] >= c1) continue;
      const value = cells.values[r * across + c], step = value === value ? paint.step(value, r) : -2;
      if (step === -1 || (step >= 0 && paint.colours[step] === paint.paper)) continue;
      const first = Math.max(cells.columns[c], Math.ceil(c0)), last = Math.min(cells.columns[c + 1], Math.floor(c1)) - 1;
      const [x1, x2] = [place.x(first), place.x(Math.max(first, last))].sort((a, b) => a - b);
      const y = place.y(cells.rows[r]), tall = (cells.rows[r + 1] - cells.rows[r]) * place.cellHeight;
      const colour = step === -2 ? now.colours.unknown : paint.colours[step];
      shapes.push(`<rect x="${x1.toFixed(2)}" y="${y.toFixed(2)}" width="${(x2 - x1 + place.cellWidth).toFixed(2)}" height="${tall.toFixed(2)}" fill="${colour}"/>`);
    }
  }
  const texts = [], label = (x, y, text, anchor, turned, size) =>
    texts.push(`<text x="${x.toFixed(1)}" y="${y.toFixed(1)}" font-size="${size.toFixed(1)}" text-anchor="${anchor}"${turned ? ` transform="rotate(-90 ${x.toFixed(1)} ${y.toFixed(1)})"` : ""} dominant-baseline="central">${escape(text)}<\/text>`);
  const down = lettersOf(place.cellHeight), over = lettersOf(place.cellWidth);
  for (let i = Math.ceil(r0); i < r1; i += down.step) label(place.left - 5, place.y(i) + place.cellHeight / 2, labelOf(pane.rowLabels, i), "end", false, down.size);
  for (let j = Math.ceil(c0); j < c1; j += over.step) label(place.x(j) + place.cellWidth / 2, place.top - 5, labelOf(pane.columnLabels, j), "start", true, over.size);
  return `<svg xmlns="${NAMESPACE}" viewBox="0 0 ${width} ${height}" width="${width}" height="${height}" font-family="sans-serif">` +
    `<rect width="${width}" height="${height}" fill="${now.colours.card}"/>` +
    `<rect x="${place.left}" y="${place.top}" width="${place.width}" height="${place.height}" fill="${paint.paper}"/><svg x="${place.left}" y="${place.top}" width="${place.width}" height="${place.height}" viewBox="${place.left} ${place.top} ${place.width} ${place.height}" overflow="hidden">${shapes.join("")}<\/svg><g fill="${now.colours.ink}">${texts.join("")}<\/g><\/svg>`;
}
