// Helpers for every part of the page: making elements, and the direction of a line of labels.

/** An element with attributes (names that begin with "on" are listeners) and children. */
export function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children);
  return made;
}

export function rightToLeft(example, labels) {
  return example.directions[labels] === "rtl";
}
