// Arrays come out of the page as they went in, whichever thread decodes them.

import assert from "node:assert/strict";
import { afterEach, test } from "node:test";
import { deflateSync } from "node:zlib";

import { decoded, fromPlanes, halfToNumber } from "../../../src/regard/views/html/page_codec.js";
import { arrayReader } from "../../../src/regard/views/html/page_worker.js";

/** An array as Python packs it: the first bytes of all numbers, then the second ones, deflated, in base64. */
function packed(values, kind) {
  const bytes = new Uint8Array(values.buffer), width = values.BYTES_PER_ELEMENT, planes = new Uint8Array(bytes.length);
  for (let at = 0; at < bytes.length; at++) planes[(at % width) * values.length + Math.floor(at / width)] = bytes[at];
  return { kind, length: values.length, data: deflateSync(planes).toString("base64") };
}

const LARGE = Float32Array.from({ length: 2 ** 17 }, (_, at) => at % 1000);
const VALUES = Float32Array.from({ length: 300 }, (_, at) => Math.sin(at) * 10 ** (at % 7));

afterEach(() => { delete globalThis.Worker; });

test("numbers of every width come back", async () => {
  for (const [values, kind] of [[VALUES, "f32"], [Uint32Array.of(0, 1, 2 ** 32 - 1), "u32"], [Uint16Array.of(7, 65535), "u16"], [Uint8Array.of(1, 255), "u8"]]) {
    assert.deepEqual(await decoded(packed(values, kind)), values);
  }
  assert.deepEqual([...await decoded(packed(Uint16Array.of(0x3c00, 0x3555, 1), "f16"))], [1, halfToNumber(0x3555), 2 ** -24].map(Math.fround));
});

test("an array that is cut short is refused", () => {
  assert.throws(() => fromPlanes(new Uint8Array(5), "f16", 3), /3 f16 has 5 bytes/);
});

test("bytes that are not deflated, or cut short, are refused", async () => {
  const { data, ...rest } = packed(VALUES, "f32");
  await assert.rejects(decoded({ ...rest, data: data.slice(0, 400) }));
  await assert.rejects(decoded({ ...rest, data: "AAAA" }));
});

test("without threads the page decodes, and each array once", async () => {
  const read = arrayReader([packed(VALUES, "f32")]);
  assert.equal(read.where(), "page");
  assert.equal(await read(0), await read(0));
});

test("bytes that the page lacks are asked for", async () => {
  const { data, ...rest } = packed(VALUES, "f32"), asked = [];
  const read = arrayReader([rest, rest], async (place) => {
    asked.push(place);
    return new Uint8Array(Buffer.from(data, "base64"));
  });
  assert.deepEqual(await read(1), VALUES);
  assert.deepEqual(asked, [1]);
});

/** A thread that answers as the page's own does, and keeps what it was asked. */
function answering(asked) {
  return class extends EventTarget {
    async postMessage([number, array]) {
      asked.push(array);
      const values = await decoded(array);
      this.dispatchEvent(Object.assign(new Event("message"), { data: [number, values] }));
    }
  };
}

test("a thread decodes large arrays, and the page small ones, before a thread could answer", async () => {
  const asked = [], arrays = [packed(VALUES, "f32"), packed(LARGE, "f32"), packed(LARGE.slice(0, 2 ** 16), "f32")];
  globalThis.Worker = answering(asked);
  const read = arrayReader(arrays);
  assert.deepEqual([await read(0), await read(2), read.where()], [VALUES, LARGE.slice(0, 2 ** 16), "page"]);
  assert.deepEqual([await read(1), read.where()], [LARGE, "worker"]);
  assert.deepEqual(asked, [arrays[1]]);
});

test("a thread that is refused later leaves its work to the page", async () => {
  globalThis.Worker = class extends EventTarget {
    postMessage() { queueMicrotask(() => this.dispatchEvent(new Event("error", { cancelable: true }))); }
  };
  const read = arrayReader([packed(LARGE, "f32")]), reading = read(0);
  await Promise.resolve();
  assert.deepEqual(await reading, LARGE);
  assert.equal(read.where(), "page");
});

test("a browser that throws where a thread is made leaves the work to the page", async () => {
  globalThis.Worker = class { constructor() { throw new Error("not allowed"); } };
  assert.deepEqual(await arrayReader([packed(LARGE, "f32")])(0), LARGE);
});
