// The weights of heads from a kernel: every received value is exact. The objects have the form of the page's. This file
// does not use the DOM.

import { clamp, edge } from "../html/page_numbers.js";
import { weightReader, weightsFrom } from "../html/page_weights.js";
import { Dropped, numbersIn } from "./questions.js";

const WHOLE = 2 ** 20;
const TILE_SIDES = [64, 128, 256, 512, 1024];
const ANSWERS_HELD = 600;

/**
 * Reads the weights of heads. `ask` asks the kernel; `arrived` is called after an answer: { numbers } marks statistics
 * of heads. Complete maps in the data are read from there.
 */
export function kernelReader(data, read, ask, arrived) {
  const carried = weightReader(data, read), pictures = new Map(), known = new Map();

  /** The statistics and the small picture of a head, sent for several heads at once. */
  async function numbersOf(place, head, later) {
    const map = data.examples[place.example].maps[place.map], at = head === "mean" ? map.shape[0] : head;
    const name = (one) => `${place.example} ${place.map} ${one}`;
    if (!pictures.has(name(at))) {
      const asked = ask({ ask: "numbers", ...place, head }, later).then(({ content, buffers }) => {
        take(map, content, buffers);
        for (let one = content.heads[0]; one < content.heads[1]; one++) {
          pictures.set(name(one), pictureIn(content, buffers, one - content.heads[0]));
        }
        arrived({ numbers: true });
        return pictures.get(name(at));
      });
      pictures.set(name(at), asked);
      asked.catch((error) => error instanceof Dropped && pictures.delete(name(at)));
    }
    return pictures.get(name(at));
  }

  async function weightsOf(map, head, what = null) {
    if (!map.kernel) return carried(map, head, what);
    const example = data.examples.findIndex(({ maps }) => maps.includes(map));
    const place = { example, map: data.examples[example].maps.indexOf(map) };
    const name = `${example} ${place.map} ${head} ${JSON.stringify(what)}`;
    if (!known.has(name)) {
      known.set(name, (async () => {
        const [, rows, columns] = map.shape;
        const own = await numbersOf(place, head).catch((error) => ({ error }));
        const question = { ...place, head, ...what };
        const base = { rows, columns, dense: null, top: null, factors: null, mask: what?.mask, ...spansOf(map) };
        if (own.error) return Object.assign(weightsFrom(base), { missing: String(own.error.message) });
        if (rows * columns <= WHOLE) {
          const { content, buffers } = await ask({ ask: "dense", ...question });
          base.dense = numbersIn(buffers[0], Float32Array);
          base.largest = what ? content.largest : undefined;
          return weightsFrom(base);
        }
        return lazyWeights({ ...base, small: what ? null : own }, question, ask, () => arrived({}));
      })());
      known.get(name).catch(() => known.delete(name));
      if (known.size > 40) known.delete(known.keys().next().value);
    }
    return known.get(name);
  }

  /** Ask for the statistics of a map's heads. */
  weightsOf.known = (map) => {
    const example = data.examples.findIndex(({ maps }) => maps.includes(map));
    return map.kernel ? numbersOf({ example, map: data.examples[example].maps.indexOf(map) }, 0).catch(() => null) : null;
  };
  weightsOf.thumbnail = async (map, head) => {
    if (!map.kernel) return carried.thumbnail(map, head);
    const example = data.examples.findIndex(({ maps }) => maps.includes(map));
    return numbersOf({ example, map: data.examples[example].maps.indexOf(map) }, head, true).catch(() => null);
  };
  return weightsOf;
}

/** Store the statistics of heads in the page's format. */
function take(map, content, buffers) {
  const [first, stop] = content.heads;
  for (let at = first; at < stop; at++) {
    map.largest[at] = content.largest[at - first];
    map.withoutSink[at] = content.withoutSink[at - first];
    for (const [name, values] of Object.entries(content.statistics)) {
      map.statistics[name] ??= [];
      map.statistics[name][at] = values[at - first];
    }
  }
  map.keyRanges = content.spans ? numbersIn(buffers.at(-1), Uint32Array) : null;
}

function pictureIn({ grid: [rows, columns], pictures }, buffers, at) {
  const cut = (name) => {
    const place = pictures.indexOf(name);
    return place < 0 ? null : numbersIn(buffers[place], Float32Array).subarray(at * rows * columns, (at + 1) * rows * columns);
  };
  return { rows, columns, largest: cut("largest"), mean: cut("mean") };
}

function spansOf({ keyRanges, shape: [, , columns] }) {
  return { masked: Boolean(keyRanges), span: (row) => (keyRanges ? [keyRanges[2 * row], keyRanges[2 * row + 1]] : [0, columns]) };
}

/** The weights of a head too large to be sent whole: rows, columns and tiles, each on first use. */
export function lazyWeights(base, question, ask, arrived) {
  const { rows, columns } = base, known = new Map(), tiles = [];
  let failed = null;

  /** The kernel's answer, or undefined before it; it is asked once. */
  function asked(name, more, decode) {
    if (!known.has(name)) {
      known.set(name, undefined);
      ask({ ...question, ...more }).then(({ content, buffers }) => {
        failed = null;
        known.set(name, decode(buffers, content));
        if (known.size > ANSWERS_HELD) known.delete(known.keys().next().value);
        arrived();
      }).catch((error) => {
        if (error instanceof Dropped) return known.delete(name);
        failed = error.message;
        return arrived();
      });
    }
    return known.get(name);
  }

  const floats = ([buffer]) => ({ kind: "all", weights: numbersIn(buffer, Float32Array) });
  const row = (at) => asked(`row ${at}`, { ask: "row", at }, floats) ?? { kind: "none" };
  const column = (at) => asked(`column ${at}`, { ask: "column", at }, floats) ?? { kind: "none" };
  const strongest = () => asked("strongest", { ask: "strongest" }, ([keys, weights]) => (
    { keys: numbersIn(keys, Int32Array), weights: numbersIn(weights, Float32Array) }));

  const span = (at) => {
    if (base.mask === "none") return [0, columns];
    if (base.mask === "causal") return [0, clamp(at + columns - rows + 1, 0, columns)];
    return base.span(at);
  };

  /** { weight } of a pair from any loaded part; else its row is requested. */
  function cell(i, j) {
    const [start, stop] = span(i);
    if (j < start || j >= stop) return { weight: 0, masked: true };
    const [ofRow, ofColumn, best] = [known.get(`row ${i}`), known.get(`column ${j}`), known.get("strongest")];
    if (ofRow) return { weight: ofRow.weights[j] };
    if (ofColumn) return { weight: ofColumn.weights[i] };
    if (best?.keys[i] === j) return { weight: best.weights[i] };
    row(i);
    return null;
  }

  /** The cells of a window: exact ones of those rows and columns; until they come, the finest loaded ones. */
  function cells([top, bottom, left, right], down, across) {
    const side = (size, dots) => (size <= Math.min(TILE_SIDES.at(-1), Math.max(8, dots)) ? size : TILE_SIDES.findLast((one) => one <= Math.min(dots, size)) ?? TILE_SIDES[0]);
    const wanted = [side(bottom - top, down), side(right - left, across)], name = `tile ${[top, bottom, left, right, ...wanted]}`;
    const found = asked(name, { ask: "tile", window: [top, bottom, left, right], cells: wanted }, (buffers, content) => {
      const made = tileOf(content, buffers);
      tiles.push(made);
      if (tiles.length > 60) tiles.shift();
      return made;
    });
    if (found) return found;
    const around = tiles.filter(({ window: [a, b, c, d] }) => a <= top && b >= bottom && c <= left && d >= right);
    const finest = around.sort((one, other) => one.rows.length / (one.window[1] - one.window[0]) - other.rows.length / (other.window[1] - other.window[0])).at(-1);
    return finest ?? (base.small ? wholeTile(base.small, rows, columns) : { what: "none", rows: [top, bottom], columns: [left, right], values: new Float32Array([NaN]) });
  }

  return {
    rows, columns, row, column, cell, cells, span, picture: () => null, finest: null,
    knowsAll: true, knowsRows: true, knowsStrongest: true, masked: base.mask && base.mask !== "own" ? base.mask === "causal" : base.masked,
    strongestKeys: () => strongest()?.keys ?? null,
    get missing() {
      return failed ?? "asked of the kernel …";
    },
  };
}

function tileOf({ window: [top, bottom, left, right], grid: [down, across] }, [values, means]) {
  const edges = (from, length, count) => Uint32Array.from({ length: count + 1 }, (_, at) => from + edge(length, count, at));
  return {
    what: means ? "largest" : "weight", window: [top, bottom, left, right],
    rows: edges(top, bottom - top, down), columns: edges(left, right - left, across),
    values: numbersIn(values, Float32Array), means: means ? numbersIn(means, Float32Array) : null,
  };
}

function wholeTile(picture, rows, columns) {
  const edges = (length, count) => Uint32Array.from({ length: count + 1 }, (_, at) => edge(length, count, at));
  return {
    what: picture.largest ? "largest" : "mean", rows: edges(rows, picture.rows), columns: edges(columns, picture.columns),
    values: picture.largest ?? picture.mean, means: picture.mean,
  };
}
