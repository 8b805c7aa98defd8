// A pyramid of one head: pictures of more and more blocks, in tiles that are loaded when visible. This file does not
// use the DOM.

import { binOf, edge } from "./page_numbers.js";

/** The edges in tokens of the blocks `first` to before `last`, of `count` blocks of `length` tokens. */
export function edgesOf(length, count, first = 0, last = count) {
  return Uint32Array.from({ length: last - first + 1 }, (_, at) => edge(length, count, first + at));
}

/** The sums of blocks with these edges, as means. */
export function meansOf(sums, rows, columns, scale) {
  const across = columns.length - 1;
  return sums.map((sum, at) => {
    const r = Math.floor(at / across), c = at % across;
    return (sum * scale) / ((rows[r + 1] - rows[r]) * (columns[c + 1] - columns[c]));
  });
}

/**
 * The levels of a head's pyramid, in the page as { grid, tile, places, massScale }. A place is that of the largest
 * weights of a tile, followed by its sums; null marks a tile of zeros.
 */
export function pyramidOf(entries, rows, columns, scale, read) {
  const known = new Map();
  return entries.map(({ grid: [down, across], tile, places, massScale }) => {
    const wide = Math.ceil(across / tile);

    /** The tiles in a window of tokens: [place, row of tiles, column of tiles]. */
    function within([r0, r1, c0, c1]) {
      const tiles = (length, count, from, to) =>
        [Math.floor(binOf(length, count, from) / tile), Math.floor(binOf(length, count, to - 1) / tile)];
      const [top, bottom] = tiles(rows, down, r0, r1), [left, right] = tiles(columns, across, c0, c1), found = [];
      for (let r = top; r <= bottom; r++) for (let c = left; c <= right; c++) found.push([places[r * wide + c], r, c]);
      return found;
    }

    const load = (window) => Promise.all(within(window).filter(([place]) => place !== null).map(async ([place]) => {
      if (!known.has(place)) known.set(place, await Promise.all([read(place), read(place + 1)]));
    }));

    /** The picture of the tiles in a window; null until they are loaded. */
    function picture(window) {
      const tiles = within(window);
      if (tiles.some(([place]) => place !== null && !known.has(place))) return null;
      const [, r0, c0] = tiles[0], [, r1, c1] = tiles.at(-1);
      const [bottom, right] = [Math.min(down, (r1 + 1) * tile), Math.min(across, (c1 + 1) * tile)];
      const edges = [edgesOf(rows, down, r0 * tile, bottom), edgesOf(columns, across, c0 * tile, right)];
      const stride = right - c0 * tile, size = (bottom - r0 * tile) * stride;
      const largest = new Float32Array(size), sums = new Float32Array(size);
      for (const [place, r, c] of tiles) {
        if (place === null) continue;
        const width = Math.min(across, (c + 1) * tile) - c * tile, [most, mass] = known.get(place);
        for (let at = 0; at < most.length; at++) {
          const to = ((r - r0) * tile + Math.floor(at / width)) * stride + (c - c0) * tile + (at % width);
          largest[to] = most[at] * scale;
          sums[to] = mass[at];
        }
      }
      return { rows: edges[0], columns: edges[1], largest, mean: meansOf(sums, ...edges, massScale) };
    }

    return { rows: down, columns: across, load, picture };
  });
}
