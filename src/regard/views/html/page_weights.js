// The numbers of a page: decode them, and read rows, columns and peaks from them. This file does not use the DOM.

/** The bytes of a base64 string. */
export function decodeBase64(text) {
  return Uint8Array.from(atob(text), (char) => char.charCodeAt(0));
}

/** The number that 16 bits mean in IEEE half precision. */
export function halfToNumber(bits) {
  const sign = bits & 0x8000 ? -1 : 1;
  const exponent = (bits >> 10) & 31;
  const fraction = bits & 1023;
  if (exponent === 31) return fraction ? NaN : sign * Infinity;
  return exponent ? sign * 2 ** (exponent - 15) * (1 + fraction / 1024) : sign * 2 ** -14 * (fraction / 1024);
}

let halves;

/** All weights of a map, head after head and row after row, as a Float32Array. */
export function decodeMap(map) {
  const bytes = decodeBase64(map.data);
  if (map.precision === "uint8") return Float32Array.from(bytes, (byte) => (byte / 255) * map.scale);
  halves ??= Float32Array.from({ length: 65536 }, (_, bits) => halfToNumber(bits));
  const values = new Float32Array(bytes.length / 2);
  for (let i = 0; i < values.length; i++) values[i] = halves[bytes[2 * i] | (bytes[2 * i + 1] << 8)];
  return values;
}

/** The rows x columns weights of one head; with head "mean", the mean over heads. */
export function headWeights(values, shape, head) {
  const [heads, rows, columns] = shape;
  const size = rows * columns;
  if (head !== "mean") return values.subarray(head * size, (head + 1) * size);
  const mean = new Float32Array(size);
  for (let i = 0; i < values.length; i++) mean[i % size] += values[i] / heads;
  return mean;
}

/** The weight that query `row` gives to every key. */
export function rowOf(weights, columns, row) {
  return weights.slice(row * columns, (row + 1) * columns);
}

/** The weight that key `column` gets from every query. */
export function columnOf(weights, columns, column) {
  return Float32Array.from({ length: weights.length / columns }, (_, row) => weights[row * columns + column]);
}

/** The largest `count` weights in order, and the sum of the other weights. */
export function strongest(weights, count) {
  const order = Array.from(weights.keys()).sort((a, b) => weights[b] - weights[a] || a - b);
  const rest = order.slice(count);
  return {
    top: order.slice(0, count).map((index) => ({ index, weight: weights[index] })),
    others: rest.length,
    sum: rest.reduce((sum, index) => sum + weights[index], 0),
  };
}

/** The largest weight of each block, with at most `size` x `size` blocks: a thumbnail that loses no peak. */
export function shrink(weights, rows, columns, size) {
  const height = Math.min(rows, size);
  const width = Math.min(columns, size);
  const small = new Float32Array(height * width);
  for (let row = 0; row < rows; row++) {
    const line = Math.floor((row * height) / rows) * width;
    for (let column = 0; column < columns; column++) {
      const cell = line + Math.floor((column * width) / columns);
      small[cell] = Math.max(small[cell], weights[row * columns + column]);
    }
  }
  return { height, width, weights: small };
}

export function largest(weights) {
  return weights.reduce((most, weight) => Math.max(most, weight), 0);
}

/** A weight as text for a reader: three decimals, but never a zero for a weight that is not zero. */
export function readable(weight) {
  if (weight === 0) return "0";
  return weight < 0.001 ? "< 0.001" : weight.toFixed(3);
}

/** The index of a weight in a scale of `steps` colours, whose last colour means `top`. */
export function step(weight, top, steps) {
  return top > 0 ? Math.min(steps - 1, Math.max(0, Math.round((weight / top) * (steps - 1)))) : 0;
}

/** The maps of an example by kind ("decoder cross"), each kind with its layers in order. */
export function kinds(maps) {
  const found = new Map();
  maps.forEach((map, index) => {
    if (!found.has(map.kind)) found.set(map.kind, []);
    found.get(map.kind).push({ layer: map.layer, index });
  });
  return found;
}
