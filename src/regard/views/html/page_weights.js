// The loaded weights of one head: rows, columns, cells, pictures. Missing ones are marked as unknown. This file does
// not use the DOM.

import { clamp, largestPlaces } from "./page_numbers.js";
import { edgesOf, meansOf, pyramidOf } from "./page_tiles.js";

/** The most products for strongest keys, a matter of latency. */
const MOST_PRODUCTS = 2 ** 30;
/** The side of every head's small picture. */
const SMALL = 64;

/**
 * A row, a column or a cell is one of
 *   { kind: "all", weights }            every weight of it
 *   { kind: "some", places, weights, rest, bound }   single weights; the sum of the others (rows), a bound on each
 *   other
 *   { kind: "none" }                    not carried
 * Pictures are { rows, columns, largest, mean }: the edges of their blocks in tokens, and values; largest or mean may
 * be null.
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
  /** The small picture of a head, present in every map. */
  weightsOf.thumbnail = async (map, head) => {
    const [entry, place] = entryOf(map, head);
    return { ...await pictureOf(map, read, entry, place), rows: entry.grid[0], columns: entry.grid[1] };
  };
  return weightsOf;
}

/** The place of a head's small picture: the mean of the heads has a picture of its own. */
function entryOf(map, head) {
  return head === "mean" ? [map.pictures[1], 0] : [map.pictures[0], head];
}

async function pictureOf(map, read, entry, place) {
  const size = entry.grid[0] * entry.grid[1];
  const cut = async (at) => (at === null ? null : (await read(at)).subarray(place * size, (place + 1) * size));
  const [largest, sums] = await Promise.all([cut(entry.largest), cut(entry.mass)]);
  const rows = edgesOf(map.shape[1], entry.grid[0]), columns = edgesOf(map.shape[2], entry.grid[1]);
  return {
    rows, columns, largest: largest && times(largest, map.scale), mean: sums && meansOf(sums, rows, columns, entry.massScale),
  };
}

async function readWeights(map, head, read, weightsOf, what) {
  const [heads, rows, columns] = map.shape;
  const scaled = async (place) => (place === null || place === undefined ? null : times(await read(place), map.scale));
  const flatSpans = map.spans === null ? null : await read(map.spans);
  const span = (row) => (flatSpans ? [flatSpans[2 * row], flatSpans[2 * row + 1]] : [0, columns]);
  const at = head === "mean" ? heads : head;
  const base = { rows, columns, span, masked: flatSpans !== null, small: null, levels: [], dense: null, top: null, factors: null, mask: what?.mask };
  const [small, place] = entryOf(map, head);
  const whole = small.grid[0] === rows && small.grid[1] === columns;
  const everyHead = () => Promise.all(Array.from({ length: heads }, (_, one) => weightsOf(map, one, what)));
  if (what && head === "mean") base.parts = await everyHead();
  else if (what) base.factors = await factorsOf(map, at, read, what);
  else if (whole) {
    const picture = await pictureOf(map, read, small, place);
    base.dense = picture.largest ?? picture.mean;
  } else {
    base.small = await pictureOf(map, read, small, place);
    base.levels = pyramidOf(map.tiles[at] ?? [], rows, columns, map.scale, read);
    if (map.exact[at] !== undefined) base.dense = await scaled(map.exact[at]);
    const top = map.top[at];
    if (top) base.top = topOf(await read(top.place), await scaled(top.place + 1), await scaled(top.place + 2), top.k, rows, columns);
    if (map.factors?.heads[at] !== undefined) base.factors = await factorsOf(map, at, read, null);
    else if (head === "mean" && map.factors && Object.keys(map.factors.heads).length === heads) {
      base.parts = await everyHead();
    }
  }
  return weightsFrom(base);
}

/** All values multiplied, in a new array unless the factor is 1. */
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
  return { scale: scale / (what?.temperature ?? 1), dim, query, key, lse: what ? null : lse };
}

/**
 * The weights of a head from its loaded parts: `rows`, `columns`, `span(row)`, `masked`, another `mask` for recomputing
 * ("none", "causal"), a `small` picture and `levels` of finer ones, and one of `dense`, `factors`, `parts` (of a mean),
 * `top`, or none.
 */
export function weightsFrom(base) {
  const { rows, columns, dense, top, factors, parts, small = null, levels = [] } = base;
  const memo = new Map();
  const remember = (name, make) => {
    if (!memo.has(name)) {
      memo.set(name, make());
      if (memo.size > 600) memo.delete(memo.keys().next().value);
    }
    return memo.get(name);
  };

  const span = (row) => {
    const mask = base.mask ?? "own";
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

  /** { weight } of a pair; { atMost } if it is not among the carried ones; null if unknown. */
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

  /** The strongest key of each query, -1 without one; null if unknown. */
  function strongestKeys() {
    return remember("strongest", () => {
      const found = new Int32Array(rows).fill(-1);
      if (top) {
        for (let i = 0; i < rows; i++) {
          const [best] = largestPlaces(top.weights.subarray(i * top.k, (i + 1) * top.k), 1);
          if (top.weights[i * top.k + best] > 0) found[i] = top.keys[i * top.k + best];
        }
        return found;
      }
      if (!knowsStrongest) return null;
      for (let i = 0; i < rows; i++) {
        const known = row(i);
        if (known.kind === "none") break;
        const best = largestPlaces(known.weights, 1)[0];
        if (best !== undefined && known.weights[best] > 0) found[i] = known.kind === "all" ? best : known.places[best];
      }
      return found;
    });
  }

  /** True if rows are loaded, wholly or in part. */
  const knowsAll = dense !== null || factors !== null || parts !== undefined;
  const products = factors ? rows * columns * factors.dim : 0;
  const knowsStrongest = top !== null || (knowsAll && (parts ? parts.every((part) => part.knowsStrongest) : products <= MOST_PRODUCTS));

  /**
   * The finest loaded picture of at most so many blocks of the whole map in a window of tokens. `load` loads the tiles
   * of a finer one.
   */
  function picture(down, across, window) {
    if (knowsAll && (dense || !small || rows * columns <= 2 ** 22)) {
      const count = [Math.min(rows, down), Math.min(columns, across)];
      return remember(`picture ${count}`, () => blocks(...count));
    }
    const fits = levels.filter((level) => level.rows <= down && level.columns <= across).reverse();
    for (const level of fits) {
      const found = level.picture(window);
      if (found) return level === fits[0] ? found : { ...found, load: () => fits[0].load(window) };
    }
    return small && { ...small, load: fits.length ? () => fits[0].load(window) : null };
  }

  /** The weights in so many blocks. */
  function blocks(down, across) {
    const largest = new Float32Array(down * across), sums = new Float32Array(down * across);
    const edges = [edgesOf(rows, down), edgesOf(columns, across)];
    for (let r = 0; r < down; r++) {
      for (let i = edges[0][r]; i < edges[0][r + 1]; i++) {
        const all = denseRow(i);
        for (let c = 0, at = r * across, j = 0; c < across; c++, at++) {
          for (; j < edges[1][c + 1]; j++) {
            sums[at] += all[j];
            if (all[j] > largest[at]) largest[at] = all[j];
          }
        }
      }
    }
    return { rows: edges[0], columns: edges[1], largest, mean: meansOf(sums, ...edges, 1) };
  }

  return {
    rows, columns, row, column, cell, span, strongestKeys, picture, knowsAll, knowsStrongest,
    masked: base.mask && base.mask !== "own" ? base.mask === "causal" : base.masked,
    knowsRows: knowsAll || top !== null,
    /** The number of blocks in the finest carried picture. */
    finest: levels.length ? [levels.at(-1).rows, levels.at(-1).columns] : small && [small.rows.length - 1, small.columns.length - 1],
    largest: base.largest,
  };
}

function averaged(several) {
  const mean = new Float32Array(several[0].length);
  for (const one of several) for (let i = 0; i < one.length; i++) mean[i] += one[i] / several.length;
  return mean;
}

/**
 * The counterpart in another list of each token, -1 without one: the common prefix, and the common suffix. Without
 * labels the positions are compared.
 */
export function counterparts(one, other) {
  const found = new Int32Array(one.count).fill(-1), least = Math.min(one.count, other.count);
  const same = (a, b) => (one.texts && other.texts ? one.texts[a] === other.texts[b] : !one.texts && !other.texts);
  let from = 0;
  while (from < least && (one.count === other.count || same(from, from))) found[from] = from++;
  if (!one.texts) return found;
  for (let back = 1; back <= least - from && same(one.count - back, other.count - back); back++) found[one.count - back] = other.count - back;
  return found;
}

/**
 * The difference of two maps, where both are loaded: its "weights" may be below 0. `rowsTo` and `columnsTo` are
 * counterparts.
 */
export function difference(one, other, rowsTo = null, columnsTo = null) {
  const { rows, columns } = one, rowOf = (row) => rowsTo?.[row] ?? row, columnOf = (column) => columnsTo?.[column] ?? column;
  const cell = (i, j) => {
    if (rowOf(i) < 0 || columnOf(j) < 0) return null;
    const [a, b] = [one.cell(i, j), other.cell(rowOf(i), columnOf(j))];
    if (a?.weight === undefined || b?.weight === undefined) return null;
    return { weight: a.weight - b.weight, masked: a.masked && b.masked };
  };
  /** A line of each map: `to` gives the counterparts of its positions, and `at` a cell of the difference. */
  const line = (a, b, to, at) => {
    if (a.kind === "none" || b.kind === "none") return { kind: "none" };
    if (a.kind === "all" && b.kind === "all" && !to) return { kind: "all", weights: a.weights.map((weight, i) => weight - b.weights[i]) };
    const from = to && new Map([...to.entries()].map(([place, counterpart]) => [counterpart, place]));
    const placesIn = (known) => (known.kind === "all" ? known.weights.keys() : known.places);
    const places = new Set([...placesIn(a), ...[...placesIn(b)].map((place) => (from ? from.get(place) : place))]);
    places.delete(undefined);
    const found = [...places].map((place) => [place, at(place)]).filter(([, value]) => value);
    return { kind: "some", places: found.map(([place]) => place), weights: found.map(([, value]) => value.weight), rest: null, bound: null };
  };
  const row = (index) => (rowOf(index) < 0 ? { kind: "none" } : line(one.row(index), other.row(rowOf(index)), columnsTo, (place) => cell(index, place)));
  const column = (index) => (columnOf(index) < 0 ? { kind: "none" } : line(one.column(index), other.column(columnOf(index)), rowsTo, (place) => cell(place, index)));
  const picture = (down, across, window) => {
    if (rowsTo || columnsTo) return null;
    let [a, b] = [one.picture(down, across, window), other.picture(down, across, window)];
    const load = a?.load || b?.load ? () => Promise.all([a.load?.(), b.load?.()]) : null;
    const differ = () => a && b && (String(a.rows) !== String(b.rows) || String(a.columns) !== String(b.columns));
    if (differ()) [a, b] = [one.picture(SMALL, SMALL, window), other.picture(SMALL, SMALL, window)];
    // Of blocks, only means have a meaningful difference.
    if (!a?.mean || !b?.mean || differ()) return null;
    return { rows: a.rows, columns: a.columns, largest: null, mean: a.mean.map((value, at) => value - b.mean[at]), load };
  };
  return {
    rows, columns, row, column, cell, picture, span: one.span, masked: one.masked && other.masked, signed: true,
    knowsAll: one.knowsAll && other.knowsAll, knowsRows: one.knowsRows && other.knowsRows,
    finest: one.finest && other.finest && (one.finest[0] < other.finest[0] ? one.finest : other.finest),
    cells: one.cells && other.cells && !rowsTo && !columnsTo && ((...asked) => lessCells(one.cells(...asked), other.cells(...asked))),
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

/** The strongest weights of a row or a column, in order, and the sum of the rest. */
export function strongest(known, count) {
  const order = largestPlaces(known.weights.map(Math.abs), count);
  const top = order.map((at) => ({ place: known.kind === "all" ? at : known.places[at], weight: known.weights[at] }));
  let shown = 0, sum = 0;
  for (const { weight } of top) shown += weight;
  for (const weight of known.weights) sum += weight;
  return { top, others: known.weights.length - top.length, othersSum: sum - shown, sum };
}
