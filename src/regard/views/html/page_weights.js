// The weights of one head, as far as they are known: rows, columns, cells, pictures. Nothing is made up: what is not
// known is said to be not known. This file does not use the DOM.

import { binOf, clamp, edge, largestPlaces } from "./page_numbers.js";

/**
 * A row, a column or a cell is one of
 *   { kind: "all", weights }            every weight of it
 *   { kind: "some", places, weights, rest, bound }   single weights; the sum of the others (rows), the largest that any other can be
 *   { kind: "none" }                    not carried
 * Pictures are { rows, columns, largest, mean }, blocks of nearly equal size; largest or mean may be null.
 */

/** Reads the weights of heads of the maps of a page. */
export function weightReader(data, read) {
  const known = new Map();
  async function weightsOf(map, head, what = null) {
    const name = `${data.examples.findIndex(({ maps }) => maps.includes(map))} ${map.name} ${head} ${what ? JSON.stringify(what) : ""}`;
    if (!known.has(name)) {
      known.set(name, readWeights(map, head, read, weightsOf, what));
      if (known.size > 40) known.delete(known.keys().next().value);
    }
    return known.get(name);
  }
  /** The small picture of a head, of which every map has one. */
  weightsOf.thumbnail = (map, head) => pictureOf(map, read, ...entryOf(map, head));
  return weightsOf;
}

/** Where the small picture of a head stands: that of the mean of the heads is a picture of its own. */
function entryOf(map, head) {
  return head === "mean" ? [map.pictures[1], 0] : [map.pictures[0], head];
}

async function pictureOf(map, read, entry, place) {
  const size = entry.grid[0] * entry.grid[1];
  const cut = async (at) => (at === null ? null : times((await read(at)).subarray(place * size, (place + 1) * size), map.scale));
  const [largest, mean] = [await cut(entry.largest), await cut(entry.mean)];
  return { rows: entry.grid[0], columns: entry.grid[1], largest, mean };
}

async function readWeights(map, head, read, weightsOf, what) {
  const [heads, rows, columns] = map.shape;
  const scaled = async (place) => (place === null || place === undefined ? null : times(await read(place), map.scale));
  const flatSpans = map.spans === null ? null : await read(map.spans);
  const span = (row) => (flatSpans ? [flatSpans[2 * row], flatSpans[2 * row + 1]] : [0, columns]);
  const at = head === "mean" ? heads : head;
  const base = { rows, columns, span, masked: flatSpans !== null, pictures: [], dense: null, top: null, factors: null };
  const [small, place] = entryOf(map, head);
  const whole = small.grid[0] === rows && small.grid[1] === columns;
  if (what) base.factors = await factorsOf(map, at, read, what);
  else if (whole) {
    const picture = await pictureOf(map, read, small, place);
    base.dense = picture.largest ?? picture.mean;
  } else {
    for (const entry of [[small, place], ...(map.finer[at] ?? []).map((one) => [one, 0])]) base.pictures.push(await pictureOf(map, read, ...entry));
    if (map.exact[at] !== undefined) base.dense = await scaled(map.exact[at]);
    const top = map.top[at];
    if (top) base.top = topOf(await read(top.place), await scaled(top.place + 1), await scaled(top.place + 2), top.k, rows, columns);
    if (map.factors?.heads[at] !== undefined) base.factors = await factorsOf(map, at, read, null);
    else if (head === "mean" && map.factors && Object.keys(map.factors.heads).length === heads) {
      base.parts = await Promise.all(Array.from({ length: heads }, (_, one) => weightsOf(map, one)));
    }
  }
  return weightsFrom(base);
}

/** All numbers multiplied, in a new array unless the factor is 1. */
function times(values, factor) {
  return factor === 1 ? values : values.map((value) => value * factor);
}

function topOf(steps, weights, rest, k, rows, columns) {
  const keys = new Uint32Array(rows * k);
  for (let row = 0; row < rows; row++) {
    for (let n = 0, key = 0; n < k; n++) keys[row * k + n] = key += steps[row * k + n];
  }
  return { k, keys, weights, rest, columns };
}

async function factorsOf(map, head, read, what) {
  const { scale, dim, heads } = map.factors;
  const place = heads[head];
  const [query, key, lse] = [await read(place), await read(place + 1), await read(place + 2)];
  return { scale: scale / (what?.temperature ?? 1), dim, query, key, lse: what ? null : lse, mask: what?.mask ?? "own" };
}

/**
 * The weights of a head from what is known of it: `rows`, `columns`, `span(row)`, whether it is `masked`, `pictures`,
 * and one of `dense`, `factors`, `parts` (of a mean), `top`, or none.
 */
export function weightsFrom(base) {
  const { rows, columns, dense, top, factors, parts } = base;
  const memo = new Map();
  const remember = (name, make) => {
    if (!memo.has(name)) {
      memo.set(name, make());
      if (memo.size > 600) memo.delete(memo.keys().next().value);
    }
    return memo.get(name);
  };

  const span = (row) => {
    const mask = factors?.mask ?? "own";
    if (mask === "none") return [0, columns];
    if (mask === "causal") return [0, clamp(row + columns - rows + 1, 0, columns)];
    return base.span(row);
  };

  function computedRow(row) {
    const { scale, dim, query, key } = factors, found = new Float32Array(columns), [start, stop] = span(row);
    const logs = new Float64Array(columns);
    let largest = -Infinity;
    for (let column = start; column < stop; column++) {
      let dot = 0;
      for (let d = 0, q = row * dim, k = column * dim; d < dim; d++) dot += query[q + d] * key[k + d];
      logs[column] = scale * dot;
      largest = Math.max(largest, logs[column]);
    }
    let lse = factors.lse?.[row];
    if (lse === undefined) {
      let sum = 0;
      for (let column = start; column < stop; column++) sum += Math.exp(logs[column] - largest);
      lse = largest + Math.log(sum);
    }
    for (let column = start; column < stop; column++) found[column] = Math.exp(logs[column] - lse);
    return found;
  }

  function denseRow(row) {
    if (dense) return dense.subarray(row * columns, (row + 1) * columns);
    if (factors) return remember(`row ${row}`, () => computedRow(row));
    if (parts) return remember(`row ${row}`, () => averaged(parts.map((part) => part.row(row).weights)));
    return null;
  }

  function row(index) {
    const all = denseRow(index);
    if (all) return { kind: "all", weights: all };
    if (!top) return { kind: "none" };
    const places = [], found = [];
    let bound = Infinity;
    for (let n = index * top.k; n < (index + 1) * top.k; n++) {
      if (top.weights[n] > 0) {
        places.push(top.keys[n]);
        found.push(top.weights[n]);
      }
      bound = Math.min(bound, top.weights[n]);
    }
    const rest = top.rest[index];
    return { kind: "some", places, weights: found, rest, bound: Math.min(bound, rest) };
  }

  function column(index) {
    return remember(`column ${index}`, () => {
      if (dense) return { kind: "all", weights: Float32Array.from({ length: rows }, (_, row) => dense[row * columns + index]) };
      if (factors?.lse) return { kind: "all", weights: computedColumn(index) };
      if (factors) return { kind: "all", weights: Float32Array.from({ length: rows }, (_, row) => denseRow(row)[index]) };
      if (parts) return { kind: "all", weights: averaged(parts.map((part) => part.column(index).weights)) };
      if (!top) return { kind: "none" };
      const places = [], found = [];
      for (let n = 0; n < top.keys.length; n++) {
        if (top.keys[n] !== index || !(top.weights[n] > 0)) continue;
        places.push(Math.floor(n / top.k));
        found.push(top.weights[n]);
      }
      return { kind: "some", places, weights: found, rest: null, bound: null };
    });
  }

  function computedColumn(index) {
    const { scale, dim, query, key, lse } = factors, found = new Float32Array(rows);
    for (let row = 0; row < rows; row++) {
      const [start, stop] = span(row);
      if (index < start || index >= stop) continue;
      let dot = 0;
      for (let d = 0, q = row * dim, k = index * dim; d < dim; d++) dot += query[q + d] * key[k + d];
      found[row] = Math.exp(scale * dot - lse[row]);
    }
    return found;
  }

  /** { weight } of a pair; { atMost } if it is not among those that are carried; null if nothing is known of it. */
  function cell(row_, column_) {
    const [start, stop] = span(row_);
    if (column_ < start || column_ >= stop) return { weight: 0, masked: true };
    const all = denseRow(row_);
    if (all) return { weight: all[column_] };
    const known = row(row_);
    if (known.kind === "none") return null;
    const at = known.places.indexOf(column_);
    if (at >= 0) return { weight: known.weights[at] };
    return known.rest === 0 ? { weight: 0 } : { atMost: known.bound };
  }

  /** The strongest key of each query, -1 where it has none or it is not known. */
  function strongestKeys() {
    return remember("strongest", () => {
      const found = new Int32Array(rows).fill(-1);
      for (let i = 0; i < rows; i++) {
        const known = row(i);
        if (known.kind === "none") break;
        const best = largestPlaces(known.weights, 1)[0];
        if (best !== undefined && known.weights[best] > 0) found[i] = known.kind === "all" ? best : known.places[best];
      }
      return found;
    });
  }

  /** Whether rows are known, wholly or in part. */
  const knowsAll = dense !== null || factors !== null || parts !== undefined;

  /** A picture of at most so many blocks: the finest that is known, or one that is made from the weights. */
  function picture(most) {
    if (!knowsAll) return base.pictures.findLast((one) => one.rows <= most && one.columns <= most) ?? base.pictures[0] ?? null;
    const count = [Math.min(rows, most), Math.min(columns, most)];
    if (base.pictures.length && !dense && rows * columns > 2 ** 22) return base.pictures.at(-1);
    return remember(`picture ${count}`, () => blocks(0, rows, 0, columns, count[0], count[1]));
  }

  /** Blocks of the weights from row r0 to before r1, and so on. */
  function blocks(r0, r1, c0, c1, down, across) {
    const largest = new Float32Array(down * across), mean = new Float32Array(down * across);
    for (let r = 0; r < down; r++) {
      const [top_, bottom] = [r0 + edge(r1 - r0, down, r), r0 + edge(r1 - r0, down, r + 1)];
      for (let i = top_; i < bottom; i++) {
        const all = denseRow(i);
        for (let c = 0, at = r * across; c < across; c++, at++) {
          const stop = c0 + edge(c1 - c0, across, c + 1);
          for (let j = c0 + edge(c1 - c0, across, c); j < stop; j++) {
            mean[at] += all[j];
            if (all[j] > largest[at]) largest[at] = all[j];
          }
        }
      }
      for (let c = 0, at = r * across; c < across; c++, at++) {
        mean[at] /= (bottom - top_) * (edge(c1 - c0, across, c + 1) - edge(c1 - c0, across, c));
      }
    }
    return { rows: down, columns: across, largest, mean };
  }

  return {
    rows, columns, row, column, cell, span, strongestKeys, picture, knowsAll,
    masked: base.masked || (factors !== null && factors.mask !== "own"),
    knowsRows: knowsAll || top !== null,
    finest: () => base.pictures.at(-1) ?? null,
    largest: base.largest,
  };
}

function averaged(several) {
  const mean = new Float32Array(several[0].length);
  for (const one of several) for (let i = 0; i < one.length; i++) mean[i] += one[i] / several.length;
  return mean;
}

/** One map less another of the same size, where both are known: its "weights" may be below 0. */
export function difference(one, other) {
  const { rows, columns } = one;
  const row = (index) => {
    const [a, b] = [one.row(index), other.row(index)];
    if (a.kind === "none" || b.kind === "none") return { kind: "none" };
    if (a.kind === "all" && b.kind === "all") return { kind: "all", weights: a.weights.map((weight, i) => weight - b.weights[i]) };
    return paired(a, b, (place) => [one.cell(index, place), other.cell(index, place)]);
  };
  const column = (index) => {
    const [a, b] = [one.column(index), other.column(index)];
    if (a.kind === "none" || b.kind === "none") return { kind: "none" };
    if (a.kind === "all" && b.kind === "all") return { kind: "all", weights: a.weights.map((weight, i) => weight - b.weights[i]) };
    return paired(a, b, (place) => [one.cell(place, index), other.cell(place, index)]);
  };
  const cell = (i, j) => {
    const [a, b] = [one.cell(i, j), other.cell(i, j)];
    if (a?.weight === undefined || b?.weight === undefined) return null;
    return { weight: a.weight - b.weight, masked: a.masked && b.masked };
  };
  const picture = (most) => {
    let [a, b] = [one.picture(most), other.picture(most)];
    if (!a || !b) return null;
    if (a.rows !== b.rows || a.columns !== b.columns) [a, b] = [one.picture(64), other.picture(64)];
    const [x, y] = [a.mean ?? a.largest, b.mean ?? b.largest];
    if (a.rows !== b.rows || a.columns !== b.columns || (!a.mean && a.rows < rows)) return null;
    return { rows: a.rows, columns: a.columns, largest: null, mean: x.map((value, i) => value - y[i]) };
  };
  return {
    rows, columns, row, column, cell, picture, span: one.span, masked: one.masked && other.masked, signed: true,
    knowsAll: one.knowsAll && other.knowsAll, knowsRows: one.knowsRows && other.knowsRows,
    finest: () => picture(2048), cells: one.cells && other.cells && ((...asked) => lessCells(one.cells(...asked), other.cells(...asked))),
    strongestKeys: () => new Int32Array(rows).fill(-1),
  };
}

/** The cells of a difference: of weights, or of the means of the same blocks. */
function lessCells(a, b) {
  const known = a.what !== "none" && b.what !== "none" && a.values.length === b.values.length && a.rows.length === b.rows.length;
  const [x, y] = [a.means ?? a.values, b.means ?? b.values];
  const same = known && (a.what === "weight") === (b.what === "weight") && a.rows[0] === b.rows[0] && a.columns[0] === b.columns[0];
  if (!same) return { what: "none", rows: [a.rows[0], a.rows.at(-1)], columns: [a.columns[0], a.columns.at(-1)], values: new Float32Array([NaN]) };
  return { ...a, what: a.what === "weight" ? "weight" : "mean", values: x.map((value, at) => value - y[at]), means: null };
}

/** The differences of single weights that are known on both sides. */
function paired(a, b, both) {
  const places = new Set([...(a.places ?? []), ...(b.places ?? [])]);
  const found = [...places].map((place) => [place, ...both(place)]).filter(([, x, y]) => x?.weight !== undefined && y?.weight !== undefined);
  return {
    kind: "some", places: found.map(([place]) => place), weights: found.map(([, x, y]) => x.weight - y.weight),
    rest: null, bound: null,
  };
}

/** The strongest weights of a row or a column, in order, and what is left of it. */
export function strongest(known, count) {
  const order = largestPlaces(known.weights.map(Math.abs), count);
  const top = order.map((at) => ({ place: known.kind === "all" ? at : known.places[at], weight: known.weights[at] }));
  let shown = 0, sum = 0;
  for (const { weight } of top) shown += weight;
  for (const weight of known.weights) sum += weight;
  return { top, others: known.weights.length - top.length, othersSum: sum - shown, sum };
}
