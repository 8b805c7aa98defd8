// The map as a picture: from blocks of tokens down to single cells, with missing parts marked as "not carried".

import { element, labelOf, shortened, sized, styleOf } from "./page_dom.js";
import { clamp } from "./page_numbers.js";
import { rgb } from "./page_scale.js";

const LARGEST_LETTERS = 12, SMALLEST_LETTERS = 10;
const fontOf = (size) => `${size}px system-ui, 'Noto Sans', sans-serif`;
const LABEL_WIDTH = 110;
const LARGEST_CELL = 64;
const SIDES = [64, 128, 256, 512, 1024, 2048, 4096];
const SINGLE = 160;

/**
 * The drawing of the weights from row r0 to before r1 and so on, for so many dots: the edges of rows and columns in
 * tokens, the values (NaN: not carried), and their meaning ("weight", "largest" or "mean"). Weights with a `cells`
 * method answer this themselves.
 */
export function cellsOf(weights, [r0, r1, c0, c1], down, across) {
  const [top, bottom, left, right] = [Math.floor(r0), Math.ceil(r1), Math.floor(c0), Math.ceil(c1)];
  const single = bottom - top <= Math.max(8, down) && right - left <= Math.max(8, across);
  if (weights.cells) return weights.cells([top, bottom, left, right], down, across);
  if (weights.knowsAll && single) return singles(weights, top, bottom, left, right);
  const { finest } = weights;
  const wide = finest ? Math.max(weights.rows / finest[0], weights.columns / finest[1]) : 1;
  const few = bottom - top <= Math.min(SINGLE, 4 * wide + 8) && right - left <= Math.min(SINGLE, 4 * wide + 8);
  if (!weights.knowsAll && weights.knowsRows && few) return singles(weights, top, bottom, left, right);
  // Blocks of the whole map, at the window's resolution.
  const fits = SIDES.filter((side) => side * ((bottom - top) / weights.rows) <= down && side * ((right - left) / weights.columns) <= across);
  const most = fits.at(-1) ?? SIDES[0];
  const picture = weights.picture(most, most, [top, bottom, left, right]);
  if (!picture) return { what: "none", rows: [top, bottom], columns: [left, right], values: new Float32Array([NaN]), load: null };
  const isWhole = picture.rows.length > weights.rows && picture.columns.length > weights.columns;
  return {
    what: isWhole ? "weight" : picture.largest ? "largest" : "mean", rows: picture.rows, columns: picture.columns,
    values: picture.largest ?? picture.mean, means: picture.mean, load: picture.load ?? null,
  };
}

function singles(weights, top, bottom, left, right) {
  const [down, across] = [bottom - top, right - left];
  const values = new Float32Array(down * across).fill(NaN);
  for (let i = 0; i < down; i++) {
    const known = weights.row(top + i);
    if (known.kind === "all") values.set(known.weights.subarray(left, right), i * across);
    else if (known.kind === "some") {
      if (known.rest === 0) values.fill(0, i * across, (i + 1) * across);
      known.places.forEach((place, at) => {
        if (place >= left && place < right) values[i * across + place - left] = known.weights[at];
      });
    }
  }
  const edges = (from, count) => Uint32Array.from({ length: count + 1 }, (_, index) => from + index);
  return { what: "weight", rows: edges(top, down), columns: edges(left, across), values, load: null };
}

/** The block of tokens [r0, r1, c0, c1] and the drawn value at a query and a key. */
export function blockAt(cells, row, column) {
  const find = (edges, place) => {
    let low = 0, high = edges.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (edges[middle] <= place) low = middle; else high = middle;
    }
    return low;
  };
  const [r, c] = [find(cells.rows, row), find(cells.columns, column)];
  return {
    block: [cells.rows[r], cells.rows[r + 1], cells.columns[c], cells.columns[c + 1]],
    value: cells.values[r * (cells.columns.length - 1) + c], mean: cells.means?.[r * (cells.columns.length - 1) + c], what: cells.what,
  };
}

/** A zoomable picture of a map. `act` receives events: point, choose, leave, zoom. */
export function matrixOf(name, act) {
  const canvas = element("canvas", { tabindex: 0, role: "img", "aria-label": name });
  const cross = element("canvas", { class: "cross", "aria-hidden": "true" });
  const frame = element("div", { class: "matrix" }, canvas, cross);
  const matrix = { frame, canvas, place: null, cells: null, drag: null };

  /** Draw into the available space. `pane` has the weights, labels, orders, and colours of this picture. */
  matrix.draw = (now, pane) => {
    Object.assign(matrix, { now, pane });
    const { weights } = pane;
    const width = frame.clientWidth, height = frame.clientHeight;
    if (width < 40 || height < 40) return;
    const window = now.state.window ?? [0, weights.rows, 0, weights.columns];
    const context = sized(canvas, width, height);
    context.font = fontOf(LARGEST_LETTERS);
    const place = placeOf(context, pane, window, width, height);
    const ratio = globalThis.devicePixelRatio || 1;
    const cells = cellsOf(weights, window, place.height * ratio, place.width * ratio);
    Object.assign(matrix, { place, cells });
    fillCells(context, now, pane, place, cells, ratio);
    context.strokeStyle = styleOf(now.root, "--line");
    context.strokeRect(place.left - 0.5, place.top - 0.5, place.width + 1, place.height + 1);
    drawLabels(context, now, pane, place);
    matrix.drawCross(now);
    pane.says?.(cells, window);
  };

  matrix.drawCross = (now) => {
    const { place } = matrix;
    if (!place) return;
    const context = sized(cross, frame.clientWidth, frame.clientHeight);
    const { row, column } = now.state.focus ?? {};
    context.save();
    context.beginPath();
    context.rect(place.left - 1, place.top - 1, place.width + 2, place.height + 2);
    context.clip();
    context.strokeStyle = styleOf(now.root, "--ink");
    context.lineWidth = 1.5;
    if (row !== undefined) context.strokeRect(place.left, place.y(row), place.width, Math.max(1, place.cellHeight));
    if (column !== undefined) context.strokeRect(place.x(column), place.top, Math.max(1, place.cellWidth), place.height);
    context.restore();
  };

  /** The query and the key under a point of the canvas; on a margin only one of them; null outside. */
  matrix.at = (event) => {
    const box = canvas.getBoundingClientRect(), { place } = matrix;
    if (!place) return null;
    const [x, y] = [event.clientX - box.left, event.clientY - box.top];
    const row = y >= place.top && y < place.top + place.height ? place.rowAt(y) : undefined;
    const column = x >= place.left && x < place.left + place.width ? place.columnAt(x) : undefined;
    if (row === undefined && column === undefined) return null;
    if (row === undefined) return y < place.top ? { column } : null;
    return column === undefined ? (x < place.left ? { row } : null) : { row, column };
  };

  const zoomAt = (event, factor) => {
    const { pane, now, place } = matrix;
    const { rows, columns } = pane.weights;
    const [r0, r1, c0, c1] = now.state.window ?? [0, rows, 0, columns];
    const box = canvas.getBoundingClientRect();
    const down = event ? clamp((event.clientY - box.top - place.top) / place.height, 0, 1) : 0.5;
    const along = event ? clamp((event.clientX - box.left - place.left) / place.width, 0, 1) : 0.5;
    const across = place.mirrored ? 1 - along : along;
    const axis = (from, to, share, length) => {
      const size = clamp((to - from) * factor, Math.min(4, length), length), fixed = from + (to - from) * share;
      const start = clamp(fixed - size * share, 0, length - size);
      return [start, start + size];
    };
    act("zoom", [...axis(r0, r1, down, rows), ...axis(c0, c1, across, columns)]);
  };
  const moveBy = (down, across) => {
    const { pane, now } = matrix;
    const { rows, columns } = pane.weights;
    const [r0, r1, c0, c1] = now.state.window ?? [0, rows, 0, columns];
    const axis = (from, to, by, length) => {
      const start = clamp(from + by, 0, length - (to - from));
      return [start, start + to - from];
    };
    act("zoom", [...axis(r0, r1, down, rows), ...axis(c0, c1, across, columns)]);
  };

  canvas.addEventListener("wheel", (event) => {
    event.preventDefault();
    zoomAt(event, event.deltaY > 0 ? 1.25 : 0.8);
  }, { passive: false });
  canvas.addEventListener("pointerdown", (event) => {
    matrix.drag = { x: event.clientX, y: event.clientY, moved: false };
    canvas.setPointerCapture?.(event.pointerId);
  });
  canvas.addEventListener("pointermove", (event) => {
    const { drag, place } = matrix;
    if (drag && place && (drag.moved || Math.hypot(event.clientX - drag.x, event.clientY - drag.y) > 4)) {
      const [dx, dy] = [event.clientX - drag.x, event.clientY - drag.y];
      Object.assign(drag, { x: event.clientX, y: event.clientY, moved: true });
      moveBy(-dy / place.cellHeight, ((place.mirrored ? 1 : -1) * dx) / place.cellWidth);
    } else if (!drag) act("point", matrix.at(event));
  });
  canvas.addEventListener("pointerup", (event) => {
    const was = matrix.drag;
    matrix.drag = null;
    if (was && !was.moved) act("choose", matrix.at(event));
  });
  canvas.addEventListener("pointerleave", () => act("leave"));
  canvas.addEventListener("dblclick", () => act("zoom", null));
  canvas.addEventListener("keydown", (event) => {
    if (event.ctrlKey || event.metaKey || event.altKey || !matrix.pane) return;
    const { rows, columns } = matrix.pane.weights;
    const [r0, r1, c0, c1] = matrix.now.state.window ?? [0, rows, 0, columns];
    const [down, across] = [(r1 - r0) / 8, (c1 - c0) / 8];
    const sign = matrix.place?.mirrored ? -1 : 1;
    const act_ = {
      "+": () => zoomAt(null, 0.7), "=": () => zoomAt(null, 0.7), "-": () => zoomAt(null, 1.4), 0: () => act("zoom", null),
      ArrowUp: () => moveBy(-down, 0), ArrowDown: () => moveBy(down, 0),
      ArrowLeft: () => moveBy(0, -across * sign), ArrowRight: () => moveBy(0, across * sign),
    }[event.key];
    if (!act_) return;
    event.preventDefault();
    event.stopPropagation();
    act_();
  });
  return matrix;
}

/** The positions of cells in the canvas, and of tokens. */
function placeOf(context, { rowLabels, columnLabels, columnOrder, weights }, window, width, height) {
  const [r0, r1, c0, c1] = window;
  const widest = (labels, from, to) => {
    let most = 0;
    const step = Math.max(1, Math.floor((to - from) / 60));
    for (let place = Math.floor(from); place < to && place < labels.count; place += step) {
      most = Math.max(most, context.measureText(labelOf(labels, place)).width);
    }
    return Math.min(LABEL_WIDTH, most);
  };
  const left = Math.min(width / 3, widest(rowLabels, r0, r1) + 10);
  const fitted = (top) => {
    const most = [(width - left - 8) / (c1 - c0), (height - top - 6) / (r1 - r0)].map((cell) => Math.min(LARGEST_CELL, cell));
    // Square cells, unless most of the space would be empty.
    const square = Math.min(...most);
    return Math.max(...most) / square < 3 ? [square, square] : most;
  };
  // Labels are upright if each fits above its drawn cell; else all have space to be turned.
  const columnWidth = widest(columnLabels, c0, c1);
  let top = Math.min(height / 3, 26), [cellWidth, cellHeight] = fitted(top);
  if (columnWidth + 4 > cellWidth) {
    top = Math.min(height / 3, columnWidth + 10);
    [cellWidth, cellHeight] = fitted(top);
  }
  const mirrored = columnLabels.direction === "rtl";
  const size = c1 - c0;
  // Single tokens follow the order of the script; blocks form a row, from the right in such a script.
  const ranks = ranksWithin(columnOrder, Math.floor(c0), Math.ceil(c1), weights.columns, cellWidth);
  const shift = c0 - Math.floor(c0);
  const along = (column) => (ranks ? ranks.of(column) - shift : mirrored ? size - 1 - (column - c0) : column - c0);
  return {
    left, top, width: cellWidth * size, height: cellHeight * (r1 - r0), cellWidth, cellHeight, window, mirrored, ranks,
    x: (column) => left + along(column) * cellWidth,
    y: (row) => top + (row - r0) * cellHeight,
    rowAt: (y) => clamp(Math.floor(r0 + (y - top) / cellHeight), 0, weights.rows - 1),
    columnAt: (x) => {
      const at = (x - left) / cellWidth;
      if (ranks) return ranks.at(clamp(Math.floor(at + shift), 0, ranks.count - 1));
      return clamp(Math.floor(mirrored ? c1 - at : c0 + at), 0, weights.columns - 1);
    },
  };
}

/** The order of a window's tokens; null for that of the sequence, or for blocks. */
function ranksWithin(order, from, to, count, cellWidth) {
  if (!order || cellWidth < 2) return null;
  const shown = order.filter((place) => place >= from && place < Math.min(to, count));
  const found = new Map(shown.map((place, rank) => [place, rank]));
  return { count: shown.length, at: (rank) => shown[rank], of: (column) => found.get(column) ?? -1 };
}

function fillCells(context, now, pane, place, cells, ratio) {
  const width = Math.max(1, Math.round(place.width * ratio)), height = Math.max(1, Math.round(place.height * ratio));
  const image = new ImageData(width, height), dots = new Uint32Array(image.data.buffer);
  const rowOf = new Int32Array(height), columnOf = new Int32Array(width), keyOf = new Int32Array(width), queryOf = new Int32Array(height);
  const block = (edges, token) => {
    let low = 0, high = edges.length - 1;
    if (token < edges[0] || token >= edges[high]) return -1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (edges[middle] <= token) low = middle; else high = middle;
    }
    return low;
  };
  for (let y = 0; y < height; y++) {
    queryOf[y] = place.rowAt(place.top + (y + 0.5) / ratio);
    rowOf[y] = block(cells.rows, queryOf[y]);
  }
  for (let x = 0; x < width; x++) {
    keyOf[x] = place.columnAt(place.left + (x + 0.5) / ratio);
    columnOf[x] = block(cells.columns, keyOf[x]);
  }
  const across = cells.columns.length - 1;
  const paint = pane.painter(cells);
  const pack = (hex) => {
    const [r, g, b] = rgb(hex);
    return (255 << 24) | (b << 16) | (g << 8) | r;
  };
  const table = Uint32Array.from(paint.colours, pack);
  const [paper, unknown, stripe, masked, maskedStripe] = [
    paint.paper, now.colours.unknown, now.colours.unknownStripe, now.colours.masked, now.colours.hatch].map(pack);
  const spans = pane.weights.masked ? pane.weights.span : null;
  for (let y = 0; y < height; y++) {
    const row = rowOf[y], at = row * across;
    let [start, stop] = [0, pane.weights.columns];
    if (spans && row >= 0) {
      // A block is masked if the mask hides all of it.
      start = Infinity, stop = 0;
      const [a, b] = [spans(cells.rows[row]), spans(cells.rows[row + 1] - 1)];
      start = Math.min(a[0], b[0]);
      stop = Math.max(a[1], b[1]);
    }
    for (let x = 0; x < width; x++) {
      const column = columnOf[x], dot = y * width + x;
      if (row < 0 || column < 0) continue;
      if (cells.columns[column] >= stop || cells.columns[column + 1] <= start) {
        dots[dot] = (x + y) % 6 < 1 ? maskedStripe : masked;
        continue;
      }
      const value = cells.values[at + column];
      if (value !== value) dots[dot] = (x - y + 6000) % 6 < 2 ? stripe : unknown;
      else {
        const step = paint.step(value, row);
        dots[dot] = step < 0 ? paper : table[step];
      }
    }
  }
  const buffer = document.createElement("canvas");
  Object.assign(buffer, { width, height });
  buffer.getContext("2d").putImageData(image, 0, 0);
  context.imageSmoothingEnabled = false;
  context.drawImage(buffer, place.left, place.top, place.width, place.height);
}

/** The labels of cells of one size in pixels: how many cells from one to the next, and the size of their letters. */
export function lettersOf(cell) {
  const step = Math.max(1, Math.ceil(SMALLEST_LETTERS / cell));
  return { step, size: Math.min(LARGEST_LETTERS, cell * step) };
}

function drawLabels(context, now, { rowLabels, columnLabels, weights }, place) {
  const [r0, r1, c0, c1] = place.window;
  context.fillStyle = styleOf(now.root, "--ink");
  context.textBaseline = "middle";
  const down = lettersOf(place.cellHeight), across = lettersOf(place.cellWidth);
  context.font = fontOf(down.size);
  for (let row = Math.ceil(r0 / down.step) * down.step; row < Math.min(r1, weights.rows); row += down.step) {
    const y = place.y(row) + place.cellHeight / 2;
    if (y < place.top || y > place.top + place.height) continue;
    context.textAlign = "right";
    context.fillText(shortened(context, labelOf(rowLabels, row), place.left - 8), place.left - 5, y);
  }
  context.font = fontOf(across.size);
  for (let column = Math.ceil(c0 / across.step) * across.step; column < Math.min(c1, weights.columns); column += across.step) {
    const x = place.x(column) + place.cellWidth / 2;
    if (x < place.left || x > place.left + place.width) continue;
    const label = labelOf(columnLabels, column);
    const stands = context.measureText(label).width + 4 <= place.cellWidth * across.step;
    context.save();
    context.translate(x, place.top - 5);
    if (!stands) context.rotate(-Math.PI / 2);
    context.textAlign = stands ? "center" : "left";
    context.textBaseline = stands ? "bottom" : "middle";
    context.fillText(shortened(context, label, stands ? place.cellWidth * across.step : place.top - 8), 0, 0);
    context.restore();
  }
}
