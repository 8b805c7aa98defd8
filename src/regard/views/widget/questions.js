// Questions to the kernel, and its answers. This file does not use the DOM.

const IN_FLIGHT = 2;
const MOST_WAITING = 40;

/**
 * Asks over the model of anywidget's protocol: `ask(question, later)` promises { content, buffers }. Of pending
 * questions, the newest goes first, because the reader has moved on; those marked `later` go last, in order. Each view
 * prefixes its questions: other views of the same model receive the answers too.
 */
export function asker(model) {
  const mine = Array.from(crypto.getRandomValues(new Uint32Array(2)), (part) => part.toString(36)).join("");
  const open = new Map();
  let soon = [], later = [], count = 0;

  function next() {
    while (open.size < IN_FLIGHT && soon.length + later.length) {
      const one = soon.pop() ?? later.shift(), id = `${mine}-${(count += 1)}`;
      open.set(id, one);
      model.send({ kind: "question", id, ...one.question });
    }
  }

  function heard(content, buffers) {
    const one = content?.kind === "answer" ? open.get(content.id) : undefined;
    if (!one) return;
    open.delete(content.id);
    if (content.error) one.reject(new Error(content.error));
    else one.resolve({ content, buffers });
    next();
  }
  model.on("msg:custom", heard);

  return {
    ask: (question, isLater = false) => new Promise((resolve, reject) => {
      (isLater ? later : soon).push({ question, resolve, reject });
      // An old question is no longer visible; its view asks again if needed.
      if (soon.length > MOST_WAITING) soon.shift().reject(new Dropped());
      next();
    }),
    /** Stop asking and listening. */
    stop() {
      model.off("msg:custom", heard);
      soon = [], later = [];
      open.clear();
    },
  };
}

/** A question that was never sent. */
export class Dropped extends Error {}

/** The values of a buffer, at any offset of a message. */
export function numbersIn(view, Kind) {
  return new Kind(view.buffer.slice(view.byteOffset, view.byteOffset + view.byteLength));
}
