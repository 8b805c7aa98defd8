// The view in a notebook: the page's render in a shadow root of its own, with weights that the kernel sends.

/* global PAGE_STYLE -- the style sheet of the page, which Python puts before this script */

import { render } from "../html/page.js";
import { luminance } from "../html/page_scale.js";
import { kernelReader } from "./kernel_weights.js";
import { asker } from "./questions.js";
import { stillOf } from "./still.js";

const STILL_MS = 700;

/** Show the model in `el`; returns a function that removes the view. */
function show({ model, el }) {
  const host = document.createElement("div"), shadow = host.attachShadow({ mode: "open" });
  const style = document.createElement("style"), root = document.createElement("div");
  style.textContent = PAGE_STYLE;
  root.className = "regard";
  Object.assign(host.style, { display: "block", containerType: "inline-size", height: `${model.get("height")}px` });
  // JupyterLab ignores keys pressed in here.
  host.setAttribute("data-lm-suppress-shortcuts", "true");
  shadow.append(style, root);
  el.append(host);
  const questions = asker(model), hidden = hideStills(model.get("place"));
  let view = null, link = null, timer = null, isNew = true;

  function begin() {
    view?.remove();
    link = model.get("link");
    // Each view adds its data.
    const data = structuredClone(model.get("data"));
    const reader = (known, read) => kernelReader(known, read, questions.ask, (what) => { isNew = true; view?.renew(what); });
    const start = { theme: themeAround(el), ...Object.fromEntries(new URLSearchParams(link)) };
    view = render(root, data, { start, reader, onDrawn: later, onLink: (changed) => {
      [link, isNew] = [changed, true];
      model.set("link", link);
      model.save_changes();
    } });
    view.ready.catch((error) => { root.textContent = error.message; });
  }

  /** Send a picture of the view after a pause; pointing changes nothing. */
  function later() {
    clearTimeout(timer);
    timer = setTimeout(async () => {
      if (!isNew) return;
      isNew = false;
      const blob = await stillOf(root, model.get("data").title);
      if (blob && host.isConnected) model.send({ kind: "still" }, undefined, [await blob.arrayBuffer()]);
    }, STILL_MS);
  }

  const moved = () => model.get("link") !== link && begin();
  const resized = () => { host.style.height = `${model.get("height")}px`; };
  // Keys with a meaning here stop here.
  const keys = (event) => (event.defaultPrevented || event.composedPath()[0].matches?.("input, select")) && event.stopPropagation();
  host.addEventListener("keydown", keys);
  model.on("change:link", moved);
  model.on("change:height", resized);
  begin();
  // For tests and for debugging: the state of this element.
  host.regard = () => view;
  return () => {
    clearTimeout(timer);
    model.off("change:link", moved);
    model.off("change:height", resized);
    questions.stop();
    hidden.remove();
    view.remove();
    host.remove();
  };
}

/** Hide the notebook's pictures of the last view while this view is live. */
function hideStills(name) {
  const style = document.createElement("style");
  style.textContent = `.${name} { display: none }`;
  document.head.append(style);
  return style;
}

/** "dark" or "light", by the background of an element. */
function themeAround(el) {
  for (let at = el; at; at = at.parentElement ?? at.getRootNode().host) {
    const [r, g, b, alpha = "1"] = getComputedStyle(at).backgroundColor.match(/[\d.]+/g) ?? [];
    if (b === undefined || Number(alpha) < 0.5) continue;
    const hex = [r, g, b].map((part) => Math.round(Number(part)).toString(16).padStart(2, "0")).join("");
    return luminance(`#${hex}`) < 0.2 ? "dark" : "light";
  }
  return globalThis.matchMedia?.("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

export default { render: show };
