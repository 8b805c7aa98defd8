// From weights to colours: one rule for tokens, maps and thumbnails. This file does not use the DOM.

import { clamp } from "./page_numbers.js";

/** The most powers of ten on the logarithmic scale. */
const DECADES = 4;

/** The low limit of the logarithmic scale: the smallest positive value, at most so many decades under the largest. */
export function lowOf(values, top) {
  let lowest = top;
  for (const value of values) if (value > 0 && value < lowest) lowest = value;
  return lowest < top ? Math.max(lowest, top * 10 ** -DECADES) : top / 10;
}

/** The position of a weight on the ramp, from 0 to 1, if `top` is the largest; the rule of Python's views. */
export function shareOf(weight, top, scale, low = top * 10 ** -DECADES) {
  if (!(weight > 0) || !(top > 0)) return 0;
  const share = weight / top;
  if (scale === "sqrt") return Math.min(1, Math.sqrt(share));
  if (scale === "log") return clamp(Math.log(weight / low) / Math.log(top / low), 0, 1);
  return Math.min(1, share);
}

/** The index of a share among `steps` colours. */
export function stepOf(share, steps) {
  return clamp(Math.round(share * (steps - 1)), 0, steps - 1);
}

export function rgb(hex) {
  const bits = parseInt(hex.slice(1), 16);
  return [bits >> 16, (bits >> 8) & 255, bits & 255];
}

/** The relative luminance of a colour (WCAG 2.2). */
export function luminance(hex) {
  const [r, g, b] = rgb(hex).map((byte) => (byte / 255 <= 0.04045 ? byte / 255 / 12.92 : ((byte / 255 + 0.055) / 1.055) ** 2.4));
  return 0.2126 * r + 0.7152 * g + 0.0722 * b;
}

/** Black or white, whichever is more legible on a colour: never under 4.5 : 1. */
export function inkOn(hex) {
  const light = luminance(hex);
  return (light + 0.05) / 0.05 >= 1.05 / (light + 0.05) ? "#000000" : "#ffffff";
}
