// Arrays from text: base64, deflate, bytes in planes, half precision. This file does not use the DOM.

/** The bytes of a base64 string. */
export function decodeBase64(text) {
  return Uint8Array.fromBase64 ? Uint8Array.fromBase64(text) : Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

/** The value of 16 bits in IEEE half precision. */
export function halfToNumber(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}

let halves;

/** Half-precision values as a Float32Array. */
export function fromHalves(bits) {
  halves ??= Float32Array.from({ length: 65536 }, (_, pattern) => halfToNumber(pattern));
  const values = new Float32Array(bits.length);
  for (let i = 0; i < bits.length; i++) values[i] = halves[bits[i]];
  return values;
}

/** Inflated bytes, without Blob and Response, which wait for other processes of the browser. */
export async function inflate(bytes) {
  const { readable, writable } = new DecompressionStream("deflate");
  const writer = writable.getWriter(), reader = readable.getReader(), parts = [];
  const written = writer.write(bytes).then(() => writer.close());
  written.catch(() => null); // the reader reports the fault
  let length = 0;
  for (let next = await reader.read(); !next.done; next = await reader.read()) {
    parts.push(next.value);
    length += next.value.length;
  }
  const all = new Uint8Array(length);
  let at = 0;
  for (const part of parts) {
    all.set(part, at);
    at += part.length;
  }
  return all;
}

export const WIDTH = { f16: 2, f32: 4, u8: 1, u16: 2, u32: 4 };

/** Values from the planes of their bytes: all first bytes, then all second ones. */
export function fromPlanes(planes, kind, length) {
  const width = WIDTH[kind];
  if (planes.length !== width * length) throw new Error(`an array of ${length} ${kind} has ${planes.length} bytes`);
  const bytes = new Uint8Array(width * length);
  for (let plane = 0; plane < width; plane++) {
    const from = plane * length;
    for (let i = 0, at = plane; i < length; i++, at += width) bytes[at] = planes[from + i];
  }
  const { buffer } = bytes;
  if (kind === "f16") return fromHalves(new Uint16Array(buffer));
  return new { f32: Float32Array, u8: Uint8Array, u16: Uint16Array, u32: Uint32Array }[kind](buffer);
}

/** The values of an array: `data` are deflated bytes, or these in base64. */
export async function decoded({ kind, length, data }) {
  const bytes = typeof data === "string" ? decodeBase64(data) : data;
  return fromPlanes(await inflate(bytes), kind, length);
}
