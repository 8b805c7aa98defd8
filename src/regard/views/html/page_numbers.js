// Values for readers, and the rule for blocks of tokens. This file does not use the DOM.

/** The start of bin `index` of `count`: the first length % count bins have one position more, as in Python. */
export function edge(length, count, index) {
  const size = Math.floor(length / count);
  return index * size + Math.min(index, length % count);
}

/** The bin of a position. */
export function binOf(length, count, place) {
  const size = Math.floor(length / count), extra = length % count, big = extra * (size + 1);
  return place < big ? Math.floor(place / (size + 1)) : extra + Math.floor((place - big) / size);
}

/** A number as text: three decimals, below 0.01 three significant digits, and never zero for a weight above zero. */
export function readable(weight) {
  if (weight === 0) return "0";
  if (!Number.isFinite(weight)) return String(weight);
  const size = Math.abs(weight);
  if (size >= 1000) return weight.toPrecision(4);
  return size >= 0.01 ? weight.toFixed(3) : size >= 1e-6 ? weight.toPrecision(3) : weight.toExponential(2);
}

/** A number and its noun: "1 query", "2 queries". */
export function counted(count, noun) {
  return `${count} ${count === 1 ? noun : /[^aeiou]y$/.test(noun) ? `${noun.slice(0, -1)}ies` : `${noun}s`}`;
}

/** "8 x 8 (tokens 760 to 767 x 400 to 407)". */
export function blockText([r0, r1, c0, c1]) {
  const range = (start, stop) => (stop - start === 1 ? String(start) : `${start} to ${stop - 1}`);
  return `${r1 - r0} × ${c1 - c0} (tokens ${range(r0, r1)} × ${range(c0, c1)})`;
}

/** The positions of the largest `count` values, in order; of equals the first. */
export function largestPlaces(values, count) {
  const best = [];
  for (let i = 0; i < values.length; i++) {
    if (best.length === count && !(values[i] > values[best[count - 1]])) continue;
    let at = best.length === count ? count - 1 : best.length;
    while (at > 0 && values[best[at - 1]] < values[i]) at--;
    best.splice(at, 0, i);
    if (best.length > count) best.pop();
  }
  return best;
}

export function clamp(number, low, high) {
  return Math.min(high, Math.max(low, number));
}

/** A line of CSV (RFC 4180), with quotes where needed. */
export function csvLine(fields) {
  return fields.map((field) => (/[",\n\r]/.test(String(field)) ? `"${String(field).replaceAll('"', '""')}"` : String(field))).join(",");
}
