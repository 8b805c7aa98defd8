// What is known of a head: tiles come when they are in view, and what is not carried is never made up.

import assert from "node:assert/strict";
import { test } from "node:test";

import { cellsOf } from "../../../src/regard/views/html/page_matrix.js";
import { binOf } from "../../../src/regard/views/html/page_numbers.js";
import { edgesOf, pyramidOf } from "../../../src/regard/views/html/page_tiles.js";
import { difference, strongest, weightReader } from "../../../src/regard/views/html/page_weights.js";

const TOKENS = 300;
const weight = (row, column) => (column > row ? 0 : (((row * 31 + column * 17) % 97) + 1) / 100);

/** The largest weight and the sum of each block, from the weights alone. */
function blocks(count) {
  const largest = new Float32Array(count * count), mass = new Float32Array(count * count);
  for (let row = 0; row < TOKENS; row++) {
    for (let column = 0; column < TOKENS; column++) {
      const at = binOf(TOKENS, count, row) * count + binOf(TOKENS, count, column);
      largest[at] = Math.max(largest[at], weight(row, column));
      mass[at] += weight(row, column);
    }
  }
  return { largest, mass };
}

/** A head of the page: 64 blocks, and a level of `count` blocks in tiles; `asked` lists the arrays that are read. */
function headOf(count, tile, { top = false } = {}) {
  const arrays = [], asked = [];
  const place = (values) => arrays.push(values) - 1;
  const small = blocks(64), { largest, mass } = blocks(count), places = [], wide = Math.ceil(count / tile);
  const picture = { grid: [64, 64], largest: place(small.largest), mass: place(small.mass.map((sum) => sum / 2)), massScale: 2 };
  for (let r = 0; r < wide; r++) {
    for (let c = 0; c < wide; c++) {
      const cut = (values) => Float32Array.from(
        Array.from({ length: count * count }, (_, at) => at).filter((at) => Math.floor(Math.floor(at / count) / tile) === r && Math.floor((at % count) / tile) === c), (at) => values[at]);
      if (!cut(largest).some(Boolean)) places.push(null);
      else {
        places.push(place(cut(largest)));
        place(cut(mass));
      }
    }
  }
  const map = {
    name: "0", shape: [1, TOKENS, TOKENS], scale: 1, spans: null, pictures: [picture], top: {}, exact: {}, factors: null,
    tiles: { 0: [{ grid: [count, count], tile, places, massScale: 1 }] },
  };
  if (top) {
    const steps = new Uint32Array(TOKENS), found = new Float32Array(TOKENS), rest = new Float32Array(TOKENS);
    for (let row = 0; row < TOKENS; row++) {
      const all = Array.from({ length: TOKENS }, (_, column) => weight(row, column)), best = all.indexOf(Math.max(...all));
      [steps[row], found[row], rest[row]] = [best, all[best], all.reduce((a, b) => a + b) - all[best]];
    }
    map.top = { 0: { k: 1, place: place(steps) } };
    place(found);
    place(rest);
  }
  const read = async (at) => {
    asked.push(at);
    return arrays[at];
  };
  return { map, read, asked, weights: () => weightReader({ examples: [{ maps: [map] }] }, read)(map, 0) };
}

const near = (found, wanted) => found.forEach((value, at) => assert.ok(Math.abs(value - wanted[at]) < 1e-4 * Math.max(1, wanted[at]), `${at}: ${value}, not ${wanted[at]}`));

test("tiles of a window are read when they are needed, and no others", async () => {
  const { map, read, asked } = headOf(128, 32);
  const [level] = pyramidOf(map.tiles[0], TOKENS, TOKENS, 1, read), window = [150, 170, 10, 30];
  assert.equal(level.picture(window), null);
  await level.load(window);
  assert.equal(asked.length, 2);
  const found = level.picture(window), whole = blocks(128);
  assert.deepEqual([...found.rows], [...edgesOf(TOKENS, 128, 32, 64)]);
  const row = binOf(TOKENS, 128, 160), column = binOf(TOKENS, 128, 20), area = (edgesOf(TOKENS, 128)[row + 1] - edgesOf(TOKENS, 128)[row]) * (edgesOf(TOKENS, 128)[column + 1] - edgesOf(TOKENS, 128)[column]);
  near([found.largest[(row - 32) * 32 + column]], [whole.largest[row * 128 + column]]);
  near([found.mean[(row - 32) * 32 + column] * area], [whole.mass[row * 128 + column]]);
});

test("a tile of zeros needs no array", async () => {
  const { map, read, asked } = headOf(128, 32), [level] = pyramidOf(map.tiles[0], TOKENS, TOKENS, 1, read);
  await level.load([0, 10, 200, 300]);
  assert.deepEqual(asked, []);
  assert.ok(level.picture([0, 10, 200, 300]).largest.every((value) => value === 0));
});

test("the small picture stands until the tiles have come", async () => {
  const head = headOf(128, 32), weights = await head.weights(), all = [0, TOKENS, 0, TOKENS];
  const before = cellsOf(weights, all, 200, 200);
  assert.deepEqual([before.what, before.rows.length], ["largest", 65]);
  near(before.values, blocks(64).largest);
  await before.load();
  const after = cellsOf(weights, all, 200, 200);
  assert.deepEqual([after.rows.length, after.load], [129, null]);
  near(after.values, blocks(128).largest);
});

test("what a picture holds is read off its blocks, and what is not carried is unknown", async () => {
  const weights = await headOf(128, 32, { top: true }).weights();
  const cells = cellsOf(weights, [100, 108, 90, 98], 400, 400);
  assert.equal(cells.what, "weight");
  cells.values.forEach((value, at) => {
    const row = 100 + Math.floor(at / 8), column = 90 + (at % 8), best = weights.strongestKeys()[row];
    if (column === best) near([value], [weight(row, column)]); else assert.ok(Number.isNaN(value));
  });
  assert.equal(weights.cell(50, 3).weight === undefined, weights.strongestKeys()[50] !== 3);
});

test("shares of a query add up to the sum of its weights", async () => {
  const weights = await headOf(128, 32, { top: true }).weights(), known = weights.row(200);
  const { sum } = strongest(known, 9), all = Array.from({ length: TOKENS }, (_, column) => weight(200, column));
  near([sum + known.rest], [all.reduce((a, b) => a + b)]);
});

test("a map less itself is 0, of blocks and of single weights", async () => {
  const weights = await headOf(128, 32, { top: true }).weights(), none = difference(weights, weights);
  assert.ok(none.picture(64, 64, [0, TOKENS, 0, TOKENS]).mean.every((value) => value === 0));
  assert.deepEqual([...none.row(7).weights], [0]);
});
