// Helpers for every part of the page: elements, canvases at device resolution, directions.

/** An element with attributes (names with "on" are listeners) and children. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

/** Give a canvas a size in CSS pixels, cleared, and return its context scaled to them. */
export function sized(canvas, width, height) {
  const ratio = globalThis.devicePixelRatio || 1;
  canvas.width = Math.max(1, Math.round(width * ratio));
  canvas.height = Math.max(1, Math.round(height * ratio));
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.setTransform(ratio, 0, 0, ratio, 0, 0);
  return context;
}

export function styleOf(root, name) {
  return getComputedStyle(root).getPropertyValue(name).trim();
}

/** The name of a token: its label, or its position without labels. */
export function labelOf(labels, place) {
  return labels.texts ? labels.texts[place] : String(place);
}

/** The text, truncated to a width. */
export function shortened(context, text, width) {
  if (context.measureText(text).width <= width) return text;
  let parts = [...text];
  while (parts.length > 1 && context.measureText(`${parts.join("")}…`).width > width) parts = parts.slice(0, -1);
  return `${parts.join("")}…`;
}

/** Save the view as a file of the reader. */
export function download(name, blob) {
  const address = URL.createObjectURL(blob);
  const link = element("a", { href: address, download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(address), 10_000);
}
