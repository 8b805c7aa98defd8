// The view as one picture, for a notebook opened without its kernel.

import { styleOf } from "../html/page_dom.js";

const STILL_MARGIN = 14;
const BESIDE = 260;
const MOST_LINES_BESIDE = 14;

/** A PNG of the visible map or links, with a title and the reading beside them, or null. */
export function stillOf(root, title) {
  const canvas = [...root.querySelectorAll(".matrix canvas, .links canvas")].find((one) => one.clientWidth > 0);
  if (!canvas) return Promise.resolve(null);
  const ratio = canvas.width / canvas.clientWidth, [across, down] = [canvas.clientWidth, canvas.clientHeight];
  const made = document.createElement("canvas"), context = made.getContext("2d");
  Object.assign(made, { width: (across + BESIDE + 3 * STILL_MARGIN) * ratio, height: (down + 40 + 2 * STILL_MARGIN) * ratio });
  context.scale(ratio, ratio);
  context.fillStyle = styleOf(root, "--card");
  context.fillRect(0, 0, made.width, made.height);
  const write = (text, x, y, font, colour) => {
    Object.assign(context, { font, fillStyle: styleOf(root, colour), textBaseline: "top" });
    context.fillText(text, x, y, x < BESIDE ? across + BESIDE : BESIDE);
  };
  write(title, STILL_MARGIN, STILL_MARGIN, "600 15px system-ui, sans-serif", "--ink");
  write(root.querySelector(".caption")?.textContent ?? "", STILL_MARGIN, STILL_MARGIN + 20, "12px system-ui, sans-serif", "--quiet");
  for (const one of canvas.parentNode.querySelectorAll("canvas")) context.drawImage(one, STILL_MARGIN, STILL_MARGIN + 40, across, down);
  const words = [...root.querySelectorAll(".reading > *, .reading li")].filter((one) => one.tagName !== "OL").slice(0, MOST_LINES_BESIDE);
  words.forEach((one, at) => {
    const text = one.tagName === "LI" ? [...one.children].map((part) => part.textContent).join("   ") : one.textContent;
    write(text, across + 2 * STILL_MARGIN, STILL_MARGIN + 40 + at * 21, "13px system-ui, 'Noto Sans', sans-serif", at ? "--ink" : "--quiet");
  });
  return new Promise((done) => made.toBlob(done));
}
