// Large arrays are decoded in a worker, so that a large page is responsive meanwhile, or in the page where workers are
// not allowed. So are small ones: a worker would answer only after the page has loaded, and a program that takes a
// picture of a page, or prints it, when it has loaded would get empty maps.

import { decodeBase64, decoded, fromHalves, fromPlanes, halfToNumber, inflate, WIDTH } from "./page_codec.js";

/** The largest array decoded in the page, in bytes: some milliseconds. */
const SMALL_BYTES = 2 ** 18;

/** The worker's program: this page's codec functions, since a page loads nothing. */
function program() {
  const parts = [decodeBase64, halfToNumber, fromHalves, inflate, fromPlanes, decoded];
  return `const WIDTH = ${JSON.stringify(WIDTH)}; let halves;
${parts.join("\n")}
onmessage = async ({ data: [number, array] }) => {
  try {
    const values = await decoded(array);
    postMessage([number, values], [values.buffer]);
  } catch (error) {
    postMessage([number, null, String(error)]);
  }
};`;
}

/** A worker that decodes, or null. `failed` is called if it turns out later that there is none. */
function threadOf(failed) {
  if (typeof Worker === "undefined") return null;
  try {
    const address = URL.createObjectURL(new Blob([program()], { type: "text/javascript" }));
    const worker = new Worker(address);
    worker.addEventListener("error", (event) => {
      event.preventDefault();
      failed();
    });
    worker.addEventListener("message", () => URL.revokeObjectURL(address), { once: true });
    return worker;
  } catch {
    return null;
  }
}

/**
 * The decoder of arrays: decode(array) promises its values; `where()` tells if there is a worker for large ones,
 * started by the first of them; close() ends it.
 */
export function decoder() {
  const waiting = new Map();
  let number = 0, worker;
  function begin() {
    worker = threadOf(() => {
      worker = null;
      for (const { array, done, refused } of waiting.values()) decoded(array).then(done, refused);
      waiting.clear();
    });
    worker?.addEventListener("message", ({ data: [which, values, error] }) => {
      const { done, refused } = waiting.get(which);
      waiting.delete(which);
      if (error) refused(new Error(error)); else done(values);
    });
  }
  return {
    decode: (array) => {
      if (WIDTH[array.kind] * array.length <= SMALL_BYTES) return decoded(array);
      if (worker === undefined) begin();
      if (!worker) return decoded(array);
      return new Promise((done, refused) => {
        waiting.set(number += 1, { array, done, refused });
        worker.postMessage([number, array]);
      });
    },
    where: () => (worker ? "worker" : "page"),
    close: () => worker?.terminate(),
  };
}

/** The arrays of a page, each decoded on first use. `bytesOf(place)` gives deflated bytes from outside the page. */
export function arrayReader(arrays, bytesOf) {
  const known = new Map(), { decode, where, close } = decoder();
  const start = async (place) => {
    const { kind, length, data } = arrays[place];
    return decode({ kind, length, data: data === undefined ? await bytesOf(place) : data });
  };
  const read = (place) => {
    if (!known.has(place)) known.set(place, start(place));
    return known.get(place);
  };
  return Object.assign(read, { where, close });
}
