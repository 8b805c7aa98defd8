// The server as the page asks it: events of an answer as they come, and weights as a kernel would send them.

/** A refusal of the server, with its status. */
export class RefusedByServer extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

/** The server: `ask` promises a response, with the token if there is one. */
export function serverOf(token) {
  async function ask(path, question = null, signal = undefined) {
    const headers = { ...(token() ? { Authorization: `Bearer ${token()}` } : {}), ...(question ? { "Content-Type": "application/json" } : {}) };
    const response = await fetch(path, { method: question ? "POST" : "GET", headers, signal, body: question ? JSON.stringify(question) : undefined });
    if (!response.ok) throw new RefusedByServer(response.status, await messageOf(response));
    return response;
  }

  /** The events of an answer: `heard` gets each piece; the last event is promised. */
  async function answer(question, heard, signal) {
    const response = await ask("/regard/v1/answer", question, signal);
    let done = null;
    for await (const { event, data } of eventsOf(response.body)) {
      if (event === "piece") heard(data.text);
      if (event === "done") done = data;
      if (event === "error") throw new RefusedByServer(503, data.error);
    }
    if (!done) throw new RefusedByServer(503, "the server ended the answer");
    return done;
  }

  /** The server as the model of anywidget's protocol, for some subjects. */
  function kernel(subjects) {
    const listeners = new Set();
    return {
      on: (_, heard) => listeners.add(heard),
      off: (_, heard) => listeners.delete(heard),
      async send({ id, kind: _, ...question }) {
        let content, buffers = [];
        try {
          ({ content, buffers } = readReply(await (await ask("/regard/v1/view/weights", { subjects, question })).arrayBuffer()));
        } catch (error) {
          content = { error: error.message };
        }
        for (const heard of listeners) heard({ ...content, kind: "answer", id }, buffers);
      },
    };
  }

  return { ask, answer, kernel };
}

async function messageOf(response) {
  const text = await response.text();
  try {
    return JSON.parse(text).error;
  } catch {
    return text || response.statusText;
  }
}

/** The events of a stream of bytes. */
export async function* eventsOf(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let held = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    held += value;
    for (let end = held.indexOf("\n\n"); end >= 0; end = held.indexOf("\n\n")) {
      const lines = held.slice(0, end).split("\n"), field = (name) => lines.find((line) => line.startsWith(name))?.slice(name.length);
      held = held.slice(end + 2);
      yield { event: field("event: ") ?? "", data: JSON.parse(field("data: ") ?? "null") };
    }
  }
}

/** The content and the buffers of a reply: see `reply_bytes` of the server. */
export function readReply(bytes) {
  const length = new DataView(bytes).getUint32(0, true);
  const { bufferBytes, ...content } = JSON.parse(new TextDecoder().decode(new Uint8Array(bytes, 4, length)));
  let at = 4 + length;
  const buffers = bufferBytes.map((size) => new DataView(bytes, (at += size) - size, size));
  return { content, buffers };
}
